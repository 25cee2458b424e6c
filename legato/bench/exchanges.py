"""What the exchanges of a group would add to the iteration of one of its ranks, which is timed without the others.

Owns what was measured of an exchange, and how that is carried to other groups. Measures nothing, and must not know how an
iteration was timed. Called by `legato.bench.slice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KERNELS_US = {2: 0.56, 4: 0.87, 8: 1.59}
"""Up to so many ranks: of one exchange in a whole iteration, its kernel run into the rank's own inbox, less the add and norm that
a rank alone makes too (records/2026-11-30-exchanges-blocks)."""
LINK_US = {4: 1.1, 8: 1.52}
"""Up to so many ranks: more of one exchange between two GPUs than of the same kernel into the own inbox. The first is two ranks',
in a chain of products (records/2026-11-30-exchanges); the second is eight ranks', in a whole iteration, where each GPU played all
seven peers of the other, so that all their words crossed the link (records/2026-11-30-exchanges-blocks)."""
BYTES_OF_ONE = 68_900
"""What a rank sent each of the others in one exchange of that iteration, on average: one request, five drafts."""
LINK_BYTES_PER_US = 365e3
"""From one GPU to another: a sum of 64 rows takes 1.95 us longer than one of 6 (records/2026-11-30-all-reduce)."""


@dataclass(frozen=True, slots=True)
class Added:
    """Microseconds that exchanges would add to an iteration.

    Attributes:
        measured: the kernels of so many ranks on one GPU, and the link between two.
        reckoned: the words beyond those of one request with five drafts, at the rate of the link, as if nothing of it were
            hidden. In neither is what a rank waits for the last of more than two, where they come at different times.
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
    further = max(0, num_bytes - count * BYTES_OF_ONE)
    each = _up_to(num_ranks, KERNELS_US) + _up_to(num_ranks, LINK_US)
    return Added(count * each, (num_ranks - 1) * further / LINK_BYTES_PER_US)


def _up_to(num_ranks: int, figures: Mapping[int, float]) -> float:
    return next((figures[most] for most in sorted(figures) if num_ranks <= most), figures[max(figures)])
