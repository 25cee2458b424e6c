"""Spans as a file for ui.perfetto.dev (and chrome://tracing): the JSON trace format, compressed.

Owns the format. A track may hold only spans that follow or hold one another, so spans that overlap go to several. Knows no
profiler. Called by the recordings of `legato bench`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.bench.trace import Span


def write(path: Path, groups: Mapping[str, Sequence[Span]], note: str) -> None:
    """Writes groups of spans, one under the other by name; times count from the first span of each group, so that groups
    that were recorded one after the other lie under one another. `note` goes into the file's metadata."""
    events: list[dict[str, Any]] = []
    for number, (name, spans) in enumerate(groups.items(), 1):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
        events += _events(number, spans)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"note": note}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _events(pid: int, spans: Sequence[Span]) -> list[dict[str, Any]]:
    ordered = sorted(spans, key=lambda span: span.start)
    begin = ordered[0].start if ordered else 0
    free: list[int] = []
    found: list[dict[str, Any]] = []
    for span in ordered:
        track = next((track for track, until in enumerate(free) if until <= span.start), len(free))
        if track == len(free):
            free.append(0)
        free[track] = span.stop
        found.append({
            "ph": "X", "pid": pid, "tid": track + 1, "name": span.name[:200],
            "ts": (span.start - begin) / 1e3, "dur": span.length / 1e3,
        })  # fmt: skip
    return found
