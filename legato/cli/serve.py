"""`legato serve`: loading with progress, one line when it is ready, and an exit code that says how it ended.

Owns what the terminal shows. Exit codes: 0 after a signal, 1 when the engine failed, 2 for what the user can put right. Called by
`legato.__main__` with what `cli.serve_checks` has checked.
"""

from __future__ import annotations

import logging
import sys
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from legato.cli import logs
from legato.cli.faults import EXIT_CODE, FAULTS
from legato.cli.serve_checks import Prepared
from legato.engine.messages import Loading
from legato.server.client import EngineFailed
from legato.server.run import Ready, in_loop, serve

log = logging.getLogger("legato.serve")

ENGINE_FAILED = 1
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


def run(prepared: Prepared) -> None:
    """Serves until it is told to stop. Exits with a code other than 0 where it ends otherwise."""
    keys = dict.fromkeys(prepared.settings.access.api_keys, "***")
    try:
        with logs.stderr_as_records() as stderr:
            logs.configure(prepared.logs, {**keys, **_paths(prepared)}, stderr)
            _run(prepared, LoadingDisplay(Console(file=stderr)))
    except EngineFailed as error:
        is_users = error.error in {fault.__name__ for fault in FAULTS}
        print(f"legato: {'' if is_users else 'the engine failed: '}{error}", file=sys.stderr)
        sys.exit(EXIT_CODE if is_users else ENGINE_FAILED)


def _run(prepared: Prepared, display: LoadingDisplay) -> None:
    tracing = None if prepared.traces is None else import_module("legato.server.tracing").start(prepared.traces)

    def ready(what: Ready) -> None:
        display.close()
        announce(what)

    try:
        in_loop(
            serve(
                prepared.config,
                prepared.settings,
                prepared.sock,
                access_log=prepared.logs.access,
                tracing=tracing,
                on_progress=display.show,
                on_ready=ready,
            )
        )
    finally:
        display.close()
        if tracing is not None:
            tracing.close()


def size_of(done: int, total: int) -> str:
    """`3.1 of 4.5 GB`, in the unit that suits the whole."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


def announce(what: Ready) -> None:
    """The line that says that requests are served now."""
    info = what.info
    drafts = f"{info.num_drafts} drafts" if info.num_drafts else "no drafts"
    print(
        f"legato is ready after {what.seconds:.1f} s: {what.name} on {info.device}, context {info.context}, "
        f"cache {info.cache_tokens} tokens ({info.latent}), index scores in {info.score_bytes >> 20} MiB, {drafts}, {what.url}",
        flush=True,
    )


def _paths(prepared: Prepared) -> dict[str, str]:
    """Paths that may turn up in messages, and the names that stand in their place."""
    paths = {str(Path.home()): "~"}
    if prepared.config.model is not None and Path(prepared.config.model).is_absolute():
        paths[prepared.config.model.rstrip("/")] = Path(prepared.config.model).name
    return paths
