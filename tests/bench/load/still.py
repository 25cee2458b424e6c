"""An event loop whose clock stands still while anybody works and jumps while everybody waits: times are exact on any machine.

For a client and a server in one loop, over real sockets. Knows nothing of either.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
ON_ITS_WAY_S = 0.003
"""Of real time: for what was written to a socket of this machine until it can be read."""


class _Still(selectors.DefaultSelector):
    """Nothing to read, and the next timer is some time away: that time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(ON_ITS_WAY_S)
        if not ready:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._still = _Still()
        super().__init__(self._still)

    def time(self) -> float:
        return self._still.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. While it runs, `time.perf_counter` is the loop's clock too."""
    with asyncio.Runner(loop_factory=_Loop) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", runner.get_loop().time)
        return runner.run(work)
