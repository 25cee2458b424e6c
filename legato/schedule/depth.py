"""How many drafts an iteration makes: the number that brings most tokens per second, by what is measured.

Owns the estimate: AL(K), the tokens of an iteration with K drafts, from how often each draft was accepted when those before it
were; and T(K), the seconds of one, as iterations took them. Seconds are handed in; no clock is read here. Called by the
scheduler.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from legato.schedule.pace import size_class

TRIALS = 6
"""Iterations with which a number of drafts is tried."""
FORGOTTEN = 2
"""Of a trial's iterations, the first ones do not count: they verify what was drafted before it."""
REVISIT = 256
"""Iterations after which the neighbours of the best number are tried again."""
KEPT = 0.995
"""What an iteration leaves of the weight of those before it."""
KNOWN = 16
"""Latest times of a number of drafts, of which the median counts."""


@dataclass(slots=True)
class Depths:
    """A choice among `choices` numbers of drafts, ascending; batches of about the same size share their measurements."""

    choices: tuple[int, ...]
    _reached: list[float] = field(default_factory=list[float])
    _accepted: list[float] = field(default_factory=list[float])
    _seconds: dict[tuple[int, int], deque[float]] = field(default_factory=dict[tuple[int, int], "deque[float]"])
    _trial: tuple[int, int] | None = None
    _since: dict[int, int] = field(default_factory=dict[int, int])
    _tried: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _last: int = -1
    _run: int = 0

    def __post_init__(self) -> None:
        self._reached, self._accepted = ([0.0] * self.choices[-1] for _ in range(2))

    def at_least(self, num_drafts: int) -> int:
        """The smallest choice that makes so many drafts, or the largest there is."""
        return next((choice for choice in self.choices if choice >= num_drafts), self.choices[-1])

    def choose(self, num_requests: int) -> int:
        """K for the next iteration of a batch of so many requests."""
        if len(self.choices) == 1:
            return self.choices[0]
        size = size_class(num_requests)
        if self._trial is None:
            self._trial = self._next_trial(size)
        if self._trial is not None:
            choice, left = self._trial
            self._trial = (choice, left - 1) if left > 1 else None
            return choice
        self._since[size] = self._since.get(size, 0) + 1
        return self.best(num_requests)

    def best(self, num_requests: int) -> int:
        """The choice with most tokens per second, among those that have been measured for such a batch; else the middle one."""
        size = size_class(num_requests)
        known = [choice for choice in self.choices if (size, choice) in self._seconds]
        if not known:
            return self.choices[len(self.choices) // 2]
        return max(
            known, key=lambda choice: self.accept_length(choice) / statistics.median(self._seconds[size, choice])
        )

    def accept_length(self, num_drafts: int) -> float:
        """Tokens that an iteration with so many drafts brings, estimated: drafts that were never made are as good as the last one
        that was."""
        length = together = 1.0
        share = 1.0
        for reached, accepted in list(zip(self._reached, self._accepted, strict=True))[:num_drafts]:
            share = accepted / reached if reached else share
            together *= share
            length += together
        return length

    def observe(self, num_drafts: int, accepted: Sequence[int], num_requests: int, seconds: float | None) -> None:
        """What an iteration with K drafts brought: `accepted` drafts of each request that may verify all K, and the time from the
        end of the one before it to its own, where that says what it took."""
        self._run = self._run + 1 if num_drafts == self._last else 1
        self._last = num_drafts
        if self._run <= FORGOTTEN:
            return
        for position in range(len(self._reached)):
            self._reached[position] *= KEPT
            self._accepted[position] *= KEPT
        for count in accepted:
            for position in range(min(count + 1, num_drafts)):
                self._reached[position] += 1
                self._accepted[position] += position < count
        if seconds is not None:
            key = size_class(num_requests), num_drafts
            self._seconds.setdefault(key, deque(maxlen=KNOWN)).append(seconds)

    def _next_trial(self, size: int) -> tuple[int, int] | None:
        """What is to be tried now: a choice that has no time yet, or, now and then, a neighbour of the best one."""
        wanted = [choice for choice in reversed(self.choices) if (size, choice) not in self._seconds]
        if not wanted:
            if self._since.get(size, 0) < REVISIT:
                return None
            self._since[size] = 0
            at = self.choices.index(self.best(size))
            wanted = [self.choices[other] for other in (at - 1, at + 1) if 0 <= other < len(self.choices)]
        least = min(wanted, key=lambda choice: self._tried.get((size, choice), 0))
        self._tried[size, least] = self._tried.get((size, least), 0) + 1
        return least, TRIALS
