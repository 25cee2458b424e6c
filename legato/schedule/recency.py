"""Which of many things was used least recently, among those that may go.

Owns the order of use and nothing else: things that may not go now are skipped when their turn comes. Called by the prefix cache,
once for the device and once for the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Used(Protocol):
    """Something that is used now and then."""

    last_use: int


T = TypeVar("T", bound=Used)


class Recency(Generic[T]):
    """A heap of what was offered. An entry counts as long as it was not used since, and `may_go` holds."""

    def __init__(self, may_go: Callable[[T], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, T]] = []
        self._offers = 0

    def offer(self, item: T, population: int) -> None:
        """Notes that something may go, if so. `population`: how many there are; entries are swept when they are many more."""
        if not self._may_go(item):
            return
        self._offers += 1
        heapq.heappush(self._heap, (item.last_use, self._offers, item))
        if len(self._heap) > 2 * population + 64:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def pop(self) -> T | None:
        """Takes out the one that was used least recently; `None` where none may go."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                return entry[2]
        return None

    def clear(self) -> None:
        """Forgets all offers."""
        self._heap = []

    def __len__(self) -> int:
        return len(self._heap)

    def _counts(self, entry: tuple[int, int, T]) -> bool:
        last_use, _, item = entry
        return item.last_use == last_use and self._may_go(item)
