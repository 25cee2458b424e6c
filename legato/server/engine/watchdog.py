"""When an engine counts as stalled: it is silent, or it is not and yet brings nobody any further.

Owns the clocks and the limit; decides nothing about what follows. Called by `server.engine.client`, a few times a second.
"""

from __future__ import annotations

import time

LONGEST_PERIOD_S = 0.25


class Watchdog:
    """Two clocks, one limit of `stall_s` seconds. Off until `begin`: loading may take as long as it takes.

    Attributes:
        period_s: how often to look.
    """

    def __init__(self, stall_s: float) -> None:
        if not stall_s > 0:
            raise ValueError(f"stall_s must be above 0, got {stall_s}")
        self.stall_s, self.period_s = stall_s, min(LONGEST_PERIOD_S, stall_s / 4)
        self._is_on = False
        self._heard_at = self._moved_at = self._looked_at = time.monotonic()

    def begin(self) -> None:
        """The engine is ready."""
        self._is_on = True
        self._heard_at = self._moved_at = self._looked_at = time.monotonic()

    def heard(self) -> None:
        """Something came from the engine."""
        self._heard_at = time.monotonic()

    def moved(self) -> None:
        """A request gained something, an iteration was run (of a prompt, say), or an idle engine was sent a request."""
        self._moved_at = time.monotonic()

    def fault(self, num_open: int) -> str | None:
        """What is wrong, if anything is, with `num_open` requests open.

        Time in which this process itself did not get to look (a suspended machine, a blocked event loop) does not count.
        """
        now = time.monotonic()
        late = max(0.0, now - self._looked_at - 2 * self.period_s)
        self._looked_at = now
        self._heard_at, self._moved_at = min(now, self._heard_at + late), min(now, self._moved_at + late)
        if not self._is_on:
            return None
        if now - self._heard_at > self.stall_s:
            return f"the engine has stalled: nothing was heard of it for {now - self._heard_at:.1f} s"
        if num_open and now - self._moved_at > self.stall_s:
            silent = now - self._moved_at
            return f"the engine has stalled: none of {num_open} open requests moved for {silent:.1f} s"
        return None
