"""What the exchanges of a group would add to the iteration of one of its ranks, which is timed without the others.

Owns what was measured of an exchange, and how that is carried to other groups. Measures nothing, and must not know how an
iteration was timed. Called by `legato.bench.slice`.
"""

from __future__ import annotations

from dataclasses import dataclass

TWO_RANKS_US = 2.35
"""Of one exchange between two GPUs, in a chain of products: 3.4 and 3.7 us in two runs, less the 1.2 of the add and norm that a
rank alone makes too (records/2026-11-30-all-reduce)."""
LINK_BYTES_PER_US = 365e3
"""From one GPU to another: a sum of 64 rows takes 1.95 us longer than one of 6 (the same record)."""


@dataclass(frozen=True, slots=True)
class Added:
    """Microseconds that exchanges would add to an iteration.

    Attributes:
        measured: what as many exchanges between two GPUs took.
        reckoned: the words for all further ranks, at the rate of the link. In neither is what a rank waits for the last of more
            than two, where they come at different times.
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
    return Added(count * TWO_RANKS_US, (num_ranks - 2) * num_bytes / LINK_BYTES_PER_US)
