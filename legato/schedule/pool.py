"""Pools of numbered things that iterations touch (cache pages, device rows): who may take one, and when it may be taken again.

What is given back while an in-flight iteration may still touch it is quarantined until that iteration has settled (reclamation
by epoch), so nothing that was launched can read or write another request's memory. Called by the scheduler only.
"""

from __future__ import annotations

from collections import deque


class Pool:
    """Numbers 1..`capacity`; number 0 is the dummy that padding uses and is never granted.

    Invariant, at any time: free + quarantined + granted = `capacity`, and no number is in two places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: deque[int] = deque(range(1, capacity + 1))
        self._quarantine: list[tuple[int, tuple[int, ...]]] = []
        self._granted: set[int] = set()
        self._settled = -1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return sum(len(numbers) for _, numbers in self._quarantine)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` numbers, or `None` (and none taken) when fewer are free."""
        if count > len(self._free):
            return None
        numbers = tuple(self._free.popleft() for _ in range(count))
        self._granted.update(numbers)
        return numbers

    def give_back(self, numbers: tuple[int, ...], last_epoch: int) -> None:
        """Returns numbers that iterations up to `last_epoch` may still touch.

        Raises:
            ValueError: one of them was not granted (given back twice, or never taken).
        """
        for number in numbers:
            if number not in self._granted:
                raise ValueError(f"{number} was given back but is not granted")
            self._granted.remove(number)
        if last_epoch <= self._settled:
            self._free.extend(numbers)
        else:
            self._quarantine.append((last_epoch, numbers))

    def settle(self, epoch: int) -> None:
        """Frees what was quarantined for iterations up to `epoch`, which has come back."""
        self._settled = max(self._settled, epoch)
        for _, numbers in (entry for entry in self._quarantine if entry[0] <= self._settled):
            self._free.extend(numbers)
        self._quarantine = [entry for entry in self._quarantine if entry[0] > self._settled]
