"""Who is next: requests that wait, the most important first, and the deadlines of all that are open.

Owns two orders and nothing else. Called by the scheduler.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from legato.schedule.request import Sequence


def rank_of(sequence: Sequence) -> tuple[int, int]:
    """Order of importance: the smallest first."""
    return sequence.rank


class WaitingQueue:
    """Requests by rank. A preempted one takes the place that its arrival gives it, before all that came later."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The next to be admitted. Raises `IndexError` when none waits."""
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=rank_of)

    def remove(self, sequence: Sequence) -> None:
        """Takes one out, wherever it stands."""
        place = bisect_left(self._sequences, sequence.rank, key=rank_of)
        assert self._sequences[place] is sequence, "only what waits is removed"
        del self._sequences[place]


class Deadlines:
    """When open requests end at the latest. Entries of requests that have ended are skipped when their time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int], Sequence]] = []
        self._sweep_at = 64

    def add(self, sequence: Sequence) -> None:
        if sequence.request.deadline is not None:
            heapq.heappush(self._heap, (sequence.request.deadline, sequence.rank, sequence))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].state != "finished"]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64

    def expired(self, now: float) -> Iterator[Sequence]:
        """Takes out those that are still open and whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.state != "finished":
                yield sequence
