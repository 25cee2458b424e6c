"""What the exchanges of a group would add to the iteration of one of its ranks, which is timed without the others.

Owns what was measured of an exchange, and how that is carried to other groups. Measures nothing, and must not know how an
iteration was timed. Called by `legato.bench.slice`.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNELS_US = {4: 0.92, 8: 3.14}
"""Up to so many ranks: of one exchange in a whole iteration, its kernel run into the rank's own inbox, less the add and norm that
a rank alone makes too (records/2026-11-30-exchanges). The first is two ranks': in a chain of products four cost as much."""
LINK_US = 1.1
"""More of one exchange between two GPUs than of the same kernel into the own inbox, in a chain of products (the same record)."""
LINK_BYTES_PER_US = 365e3
"""From one GPU to another: a sum of 64 rows takes 1.95 us longer than one of 6 (records/2026-11-30-all-reduce)."""


@dataclass(frozen=True, slots=True)
class Added:
    """Microseconds that exchanges would add to an iteration.

    Attributes:
        measured: the kernels of so many ranks, on one GPU, and a way across the link for each, between two.
        reckoned: the words for all ranks beyond the second at the rate of the link, as if nothing of it were hidden. In neither
            is what a rank waits for the last of more than two, where they come at different times.
    """

    measured: float
    reckoned: float

    @property
    def total(self) -> float:
        return self.measured + self.reckoned


def added(count: int, num_bytes: int, num_ranks: int) -> Added:
    """By `count` exchanges of an iteration of one of `num_ranks` ranks, whose own parts are `num_bytes` together."""
    if num_ranks < 2:
        return Added(0.0, 0.0)
    kernel = KERNELS_US[min(most for most in KERNELS_US if num_ranks <= most or most == max(KERNELS_US))]
    return Added(count * (kernel + LINK_US), (num_ranks - 2) * num_bytes / LINK_BYTES_PER_US)
