"""When requests are sent: at times fixed in advance (open loop) or when an earlier one has ended (closed loop).

Owns the schedule. Knows neither prompts nor servers. Called by `legato.bench.load.run`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

from legato.config import ConfigError


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """`rate` sessions per second, whether or not the server keeps up: "poisson" (independent users) or "fixed" intervals.

    Latencies count from the scheduled time, so a server that stalls is charged for everyone who would have waited: a client that
    waits for a reply before it sends the next request would never send them (coordinated omission).
    """

    rate: float
    spacing: Literal["poisson", "fixed"] = "poisson"

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate must be a positive number of requests per second, got {self.rate}")

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which `count` sessions begin, ascending; the same for the same seed."""
        if self.spacing == "fixed":
            return [index / self.rate for index in range(count)]
        draw = random.Random(seed)
        gaps = [draw.expovariate(self.rate) for _ in range(count)]
        return [0.0, *itertools.accumulate(gaps)][:count]

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"open loop, {self.spacing}, {self.rate:g} sessions/s"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each sending the next request when the last reply has ended."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {self.concurrency}")

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"closed loop, {self.concurrency} at a time"


Arrivals = OpenLoop | ClosedLoop
