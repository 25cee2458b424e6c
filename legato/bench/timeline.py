"""The project's own history: every figure that was recorded more than once, from the first record to the last.

Owns which figures have a history. Reads `records/`, measures nothing. Called by `legato bench timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench.lines import Line, figure_of

_NO_SPEED = ("ablate", "soak")
"""Benchmarks whose times are of something taken away, or of how long they were asked to run."""
_TEN_MINUTES = len("2026-11-30T06:1")


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over time: `points` are (date, commit, microseconds), ascending, the best of each commit and ten minutes."""

    name: str
    points: tuple[tuple[str, str, float], ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is an iteration of a whole rank, which is what users feel."""
        return self.name.startswith("slice ")

    @property
    def speedup(self) -> float:
        """First by last."""
        return self.points[0][2] / self.points[-1][2]


def series(lines: Sequence[Line]) -> list[Series]:
    """Figures with a time, the same when benchmark, name, case and conditions are the same on the same machine; whatever the
    implementation: a faster one is what is being looked for. Wrong results are left out. Iterations of a whole rank first,
    then the largest gain."""
    found: dict[tuple[str, str], dict[tuple[str, str], tuple[str, str, float]]] = {}
    for line in lines:
        time = line.get("median_us")
        if (
            not isinstance(time, int | float)
            or line.get("correct") is False
            or "request" in line
            or line["bench"] in _NO_SPEED
            or not line.get("date")
        ):
            continue
        commit, date = str(line.get("commit"))[:12], str(line["date"])
        by_run = found.setdefault((figure_of(line), str(line.get("gpu") or line.get("cpu"))), {})
        run = date[:_TEN_MINUTES], commit
        if run not in by_run or time < by_run[run][2]:
            by_run[run] = (date, commit, float(time))
    rows = [Series(name, tuple(sorted(points.values()))) for (name, _), points in found.items()]
    return sorted((row for row in rows if len(row.points) > 1), key=lambda row: (not row.is_whole, -row.speedup))
