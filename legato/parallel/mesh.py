"""Who a rank is among those that share one model.

Owns rank and size, frozen and passed as an argument: nothing here is global, and nothing talks to a device. Called by whoever
starts ranks, the loader of weights and the communicators.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """Rank `rank` of `size` tensor-parallel ranks. Raises `ValueError` for a rank that cannot be."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: a group has at least one rank, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1} in a group of {self.size}, got {self.rank}")

    @property
    def is_sharded(self) -> bool:
        """True where weights are divided: more than one rank."""
        return self.size > 1

    def share(self, width: int) -> range:
        """This rank's part of `width` equal shares. Raises `ValueError` where the ranks do not divide `width`."""
        if width % self.size:
            raise ValueError(f"{width} does not divide over {self.size} ranks")
        each = width // self.size
        return range(self.rank * each, (self.rank + 1) * each)


ONE_RANK = Mesh(0, 1)
"""The group of a rank that holds the whole model."""
