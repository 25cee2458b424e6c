"""`legato serve`: loading with progress, one line when it is ready, and an exit code that says how it ended.

Owns what the terminal shows. Exit codes: 0 after a signal, 1 when the engine failed, 2 for what the user can put right. Called by
`legato.__main__` with what `cli.serve_checks` has checked.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from legato.cli import logs
from legato.cli.faults import EXIT_CODE, FAULTS
from legato.cli.progress import LoadingDisplay
from legato.cli.serve_checks import Prepared
from legato.server.engine.client import EngineFailed
from legato.server.run import Ready, in_loop, serve

ENGINE_FAILED = 1


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
    tracing = (
        None if prepared.traces is None else import_module("legato.server.telemetry.tracing").start(prepared.traces)
    )

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
