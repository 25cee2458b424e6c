"""Pictures and the report page of `legato bench`, written to files.

Importing it fails with a ConfigError where matplotlib is missing: so it is imported before anything is measured. Called by
`legato.cli.bench_commands` and `share_commands`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from legato.bench import plots, report
from legato.bench.lines import Line, read
from legato.bench.timeline import Series

_CONSOLE = Console()


def pareto(found: Sequence[Line], path: Path) -> None:
    """One user against all users."""
    _save(plots.pareto(found), path)


def isl(found: Sequence[Line], path: Path) -> None:
    """Over the length of the prompt."""
    _save(plots.isl(found), path)


def share(found: Sequence[Line], path: Path) -> None:
    """One rank's share: over the context, over users, or as bars, by what varies. Of several pictures all but the first get a
    number behind their name."""
    for number, figure in enumerate(plots.share(found)):
        _save(figure, path.with_stem(f"{path.stem}-{number + 1}") if number else path)


def speed_up(found: Sequence[Line], path: Path) -> None:
    """An op's first implementation against the others, by rows."""
    _save(plots.speed_up(found), path)


def ablate(found: Sequence[Line], path: Path) -> None:
    """What each decision is worth."""
    _save(plots.ablate(found), path)


def timeline(found: Sequence[Series], path: Path) -> None:
    """What became of each figure since its first record."""
    if found:
        whole, parts = ([_history(row) for row in found if row.is_whole is wanted] for wanted in (True, False))
        _save(plots.timeline(whole, parts), path)


def _history(row: Series) -> plots.History:
    return row.name.removeprefix("slice "), [(date, us) for date, _, us in row.points]


def write_report(paths: Sequence[Path], destination: Path) -> None:
    """The page over every line of the files and folders."""
    found = read(paths, lambda left_out: _CONSOLE.print(left_out, style="dim", highlight=False))
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(report.page(found), encoding="utf-8")
    _CONSOLE.print(f"{destination}: {len(found)} lines", highlight=False)


def _save(figure: Figure, path: Path) -> None:
    plots.save(figure, path)
    _CONSOLE.print(f"picture: {path}", style="dim", highlight=False)
