"""How far loading is: a bar in a terminal, lines in a log.

Owns that display. Imports no torch: the server's process shows it too. Called by `legato serve` and by `legato.cli.loading`.
"""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from legato.engine.messages import Loading

log = logging.getLogger("legato.serve")

QUIET_S = 5.0
"""Where there is no terminal, loading is said again after so many seconds."""


class LoadingDisplay:
    """Progress of loading: a bar in a terminal; elsewhere a line for each stage, and one every few seconds."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: TaskID | None = None
        self._stage = ""
        self._said_at = 0.0

    def show(self, step: Loading) -> None:
        """One step of loading. A step that counts bytes names the tensor it reads, which is of no interest to anyone."""
        stage = "weights" if step.total else step.stage
        done = size_of(step.done, step.total) if step.total else ""
        if self._bar is not None:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task(stage, total=None, size="")
            self._bar.update(self._task, description=stage, completed=step.done, total=step.total or None, size=done)
        elif stage != self._stage or time.monotonic() - self._said_at > QUIET_S:
            log.info("loading: %s%s", stage, f", {done}" if done else "")
            self._said_at = time.monotonic()
        self._stage = stage

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


def size_of(done: int, total: int) -> str:
    """`3.1 of 4.5 GB`, in the unit that suits the whole."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"
