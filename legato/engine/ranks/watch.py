"""How a lost rank is seen and named: exits, missing signs of life, ranks that lag in a collective or a step, other results.

Owns the judgement and rank 0's watching thread. Must not know how ranks compute. Imports no torch. Called by `lead`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from legato.engine.ranks.board import Board

PERIOD_S = 0.05
LEAVE_S = 1.0
"""From the end of the engine to the end of ranks that have not left by themselves."""
STUCK_S = 1.0
"""From a rank's loss to the end of whatever rank 0's engine waits for; the other ranks are ended at once."""


class RankLost(RuntimeError):
    """The engine cannot go on: a rank has died, hangs, failed or computed something else. Named by rank and cause."""


@dataclass(slots=True)
class Lags:
    """Since when each rank has stood behind the others at the same place: (what, place) -> since when."""

    since: dict[tuple[int, str], tuple[tuple[int, int], float]] = field(
        default_factory=dict[tuple[int, str], tuple[tuple[int, int], float]]
    )

    def seconds(self, rank: int, what: str, here: int, there: int, now: float) -> float:
        """How long `rank` has stood at `here` while another stands at `there`, both unmoved; 0 where it is not behind."""
        key, place = (rank, what), (here, there)
        if here >= there:
            self.since.pop(key, None)
            return 0.0
        known = self.since.get(key)
        if known is None or known[0] != place:
            self.since[key] = (place, now)
            return 0.0
        return now - known[1]


def hung(board: Board, lags: Lags, patience_s: float, now: float) -> str | None:
    """The first rank that hangs, and in what; None where all move or wait for nothing."""
    beats = {rank: board.signs(rank).beat_ns for rank in range(1, board.num_ranks)}
    for rank, beat_ns in beats.items():
        silent = now - beat_ns / 1e9
        if beat_ns and silent > patience_s:
            return f"rank {rank} hangs: no sign of life for {silent:.1f} s"
    entered = [board.signs(rank).collectives for rank in range(board.num_ranks)]
    for rank, here in enumerate(entered):
        seconds = lags.seconds(rank, "collective", here, max(entered), now)
        if seconds > patience_s:
            return f"rank {rank} hangs: others have waited {seconds:.1f} s for it in collective {max(entered)}"
    published = board.published
    for rank in beats:
        taken = board.signs(rank).taken
        seconds = lags.seconds(rank, "step", taken, published, now)
        if seconds > patience_s:
            return f"rank {rank} hangs: it has not taken step {taken + 1} for {seconds:.1f} s"
    return None


def ended_as(status: int | None) -> str:
    """An exit code as `subprocess` counts it, in words."""
    if status is None:
        return "its process is gone"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


class Process(Protocol):
    """A child, as `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class Watch:
    """Rank 0's watching thread.

    Attributes:
        patience_s: how long a rank may stand still while others wait for it; `None` before the ranks are ready, when only
            exits and failures count.
        on_stuck: called, in the watching thread, when rank 0's engine still waits `STUCK_S` after the loss of a rank.
    """

    def __init__(self, board: Board, children: Mapping[int, Process]) -> None:
        """`children`: those ranks that rank 0 has started itself; the others are known by the process id on their page."""
        self._board, self._children = board, children
        self._lost: RankLost | None = None
        self._told, self._closed = threading.Event(), threading.Event()
        self._found = threading.Event()
        self._lags = Lags()
        self._handles: dict[int, int] = {}
        self.patience_s: float | None = None
        self.on_stuck: Callable[[RankLost], None] = lambda lost: None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether a rank has been lost."""
        return self._lost is not None

    def guard(self, on_stuck: Callable[[RankLost], None]) -> None:
        """This process is an engine's, which a server watches: it is to end when it is stuck, and to be ended by the other ranks
        when it hangs as a whole."""
        self.on_stuck = on_stuck
        self._board.guard()

    def raise_if_lost(self) -> None:
        """Raises RankLost once a rank is lost."""
        if self._lost is not None:
            self._told.set()
            raise RankLost(str(self._lost))

    def explain(self, error: Exception) -> Exception:
        """What to raise where a collective or a step has failed: the loss that explains it, if one is found soon."""
        self._found.wait(STUCK_S)
        self._told.set()
        return error if self._lost is None else RankLost(str(self._lost))

    def lose(self, reason: str) -> None:
        """Declares a loss that was seen elsewhere, and ends the other ranks."""
        if self._lost is None:
            self._lost = RankLost(reason)
        self.end_ranks()
        self._found.set()

    def end_ranks(self) -> None:
        """Kills every other rank that still runs."""
        for child in self._children.values():
            child.kill()
        for handle in self._handles.values():  # not by the process id, which could be someone else's by now
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def close(self) -> None:
        """Stops watching, lets the other ranks leave, and ends those that do not."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2)
        self._board.close()
        deadline = time.monotonic() + LEAVE_S
        others = range(1, self._board.num_ranks)
        while self._lost is None and time.monotonic() < deadline and not all(map(self._has_ended, others)):
            time.sleep(0.01)
        self.end_ranks()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._board.signs(0).beat()
            reason = self._judge(time.monotonic())
            if reason is not None:
                self.lose(reason)
                if not self._told.wait(STUCK_S) and not self._closed.is_set():
                    self.on_stuck(RankLost(reason))
                return

    def _judge(self, now: float) -> str | None:
        for rank in range(1, self._board.num_ranks):
            signs = self._board.signs(rank)
            if signs.fault:
                return f"rank {rank} failed: {signs.fault}"
            if self._has_ended(rank):
                status = self._children[rank].poll() if rank in self._children else None
                fault = signs.fault  # written just before the end
                return f"rank {rank} failed: {fault}" if fault else f"rank {rank} is lost: {ended_as(status)}"
        return None if self.patience_s is None else hung(self._board, self._lags, self.patience_s, now)

    def _has_ended(self, rank: int) -> bool:
        if rank in self._children:
            return self._children[rank].poll() is not None
        handle = self._handles.get(rank)
        if handle is None:
            pid = self._board.signs(rank).pid
            if not pid:
                return False
            try:
                handle = self._handles[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
        watched = select.poll()
        watched.register(handle, select.POLLIN)
        return bool(watched.poll(0))
