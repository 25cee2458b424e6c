"""Plain counters for one process: histograms with weights, and rates over the last seconds.

Owns the arithmetic of counting; knows neither requests nor metric names. Called by `server.telemetry.metrics`, in the event loop
only, so nothing here locks: one observation costs less than a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


class Histogram:
    """Counts of observations at or below each bound, as Prometheus understands a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Counts `value` `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), ending with "+Inf"."""
        running, rows = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            running += count
            rows.append((bound, float(running)))
        return rows


@dataclass(slots=True)
class Second:
    """What happened within one second of the monotonic clock."""

    start: int
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Recent:
    """The last whole seconds together. Rates are per second; `accept_length` is `None` without a round."""

    tokens_per_second: float
    prompt_tokens_per_second: float
    accept_length: float | None
    accept_rate: float | None


class Window:
    """The last `seconds` seconds, one slot each; the running second is kept apart until it is over."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self._past: deque[Second] = deque(maxlen=seconds)
        self._now: Second | None = None

    def at(self, now: float) -> Second:
        """The slot of the second that `now` lies in; older ones move into the past, with empty ones between."""
        start = int(now)
        if self._now is None or start - self._now.start > self.seconds:
            self._past.clear()
            self._now = Second(start)
        while self._now.start < start:
            self._past.append(self._now)
            self._now = Second(self._now.start + 1)
        return self._now

    def past(self, now: float, seconds: int | None = None) -> list[Second]:
        """The whole seconds before the one of `now`, oldest first: at most `seconds` of them."""
        self.at(now)
        slots = list(self._past)
        return slots if seconds is None else slots[-seconds:]

    def recent(self, now: float, seconds: int) -> Recent:
        """Rates over the last `seconds` whole seconds (or as many as there were)."""
        slots = self.past(now, seconds)
        span = max(1, len(slots))
        rounds, accepted = sum(slot.rounds for slot in slots), sum(slot.accepted for slot in slots)
        drafted = sum(slot.drafted for slot in slots)
        return Recent(
            sum(slot.tokens for slot in slots) / span,
            sum(slot.prompt_tokens for slot in slots) / span,
            1 + accepted / rounds if rounds else None,
            accepted / drafted if drafted else None,
        )
