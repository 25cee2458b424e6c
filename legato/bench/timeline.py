"""The project's own history: every figure that was recorded more than once, from the first record to the last.

Owns what counts as the same figure. Reads `records/`, measures nothing. Called by `legato bench timeline`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench.lines import Line


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over time: `points` are (date, commit, microseconds), ascending, the best of each commit."""

    name: str
    points: tuple[tuple[str, str, float], ...]

    @property
    def speedup(self) -> float:
        """First by last."""
        return self.points[0][2] / self.points[-1][2]


def series(lines: Sequence[Line]) -> list[Series]:
    """Figures with a time, the same when benchmark, name and case are the same on the same machine; whatever the implementation:
    a faster one is what is being looked for. Wrong results are left out. Largest gain first."""
    found: dict[tuple[str, ...], dict[str, tuple[str, str, float]]] = {}
    for line in lines:
        time = line.get("median_us")
        if (
            not isinstance(time, int | float)
            or line.get("correct") is False
            or "request" in line
            or not line.get("date")
        ):
            continue
        case = json.dumps(line.get("case"), sort_keys=True)
        k = "" if line.get("k") is None else f"K = {line['k']}"
        key = (str(line["bench"]), str(line.get("name")), case, k, str(line.get("gpu")))
        commit, date = str(line.get("commit"))[:12], str(line["date"])
        by_commit = found.setdefault(key, {})
        if commit not in by_commit or time < by_commit[commit][2]:
            by_commit[commit] = (date, commit, float(time))
    rows = [
        Series(" ".join(part for part in key[:4] if part), tuple(sorted(points.values())))
        for key, points in found.items()
    ]
    return sorted((row for row in rows if len(row.points) > 1), key=lambda row: -row.speedup)
