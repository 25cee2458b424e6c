"""Reading measurements back: JSON lines from files and folders, by benchmark.

Owns the errors of a damaged record, and what counts as the same figure measured again. Called by the plots' commands, `legato
bench report` and `legato bench timeline`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from legato.config import ConfigError

Line = Mapping[str, Any]
_USUAL: Line = {"rank": 0, "drafts": "stored", "dense": "stored", "weights": "dummy"}
"""What a case means where it does not say: what older lines leave out."""
_BESIDES = ("k", "batch", "context", "distinct_experts")
"""What tells figures apart besides their case."""


def read(paths: Sequence[Path], watch: Callable[[str], None] = lambda _: None) -> list[Line]:
    """Every line of the files, and of the `*.jsonl` below the folders, in order; each carries its `file`. Folders may hold other
    lines too: `watch` is told of the files of which some are left out.

    Raises:
        ConfigError: a path is missing, a line is not JSON, or one of a file that was named is no measurement; the message names
            file and line.
    """
    found: list[Line] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        if not path.is_dir():
            found += _measurements(path, _lines(path))
            continue
        for file in sorted(path.rglob("*.jsonl")):
            listed = _lines(file)
            own = {number: line for number, line in listed.items() if "bench" in line}
            found += _measurements(file, own)
            if len(own) < len(listed):
                watch(f"{file}: {len(listed) - len(own)} of {len(listed)} lines left out: they do not say which bench")
    if not found:
        raise ConfigError(f"no measurements (*.jsonl) in {', '.join(map(str, paths))}")
    return found


def _lines(file: Path) -> dict[int, dict[str, Any]]:
    """The objects of a file by the number of their line."""
    found: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            value: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: is not JSON ({error})") from error
        found[number] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return found


def _measurements(file: Path, lines: Mapping[int, dict[str, Any]]) -> list[Line]:
    for number, line in lines.items():
        if "bench" not in line:
            raise ConfigError(f"{file}, line {number}: is no measurement: it does not say which bench")
    return [{**line, "file": str(file)} for line in lines.values()]


def of(lines: Sequence[Line], bench: str) -> list[Line]:
    """The lines of one benchmark that are figures: of `serve`, the runs and not their requests."""
    return [line for line in lines if line["bench"] == bench and "request" not in line]


def figure_of(line: Line) -> str:
    """The figure in words, the same for older lines and newer ones, whatever the implementation and the machine."""
    case: Any = line.get("case")
    told: Line = cast("Line", case) if isinstance(case, dict) else {"": case}
    own = {key: value for key, value in told.items() if _USUAL.get(key, ...) != value}
    besides = {key: line[key] for key in _BESIDES if line.get(key) is not None and key not in own}
    words = [f"{key} {_number(value)}".strip() for key, value in {**own, **besides}.items()]
    return f"{line['bench']} {line.get('name')}: {', '.join(words)}"


def latest(lines: Sequence[Line]) -> list[Line]:
    """Of each figure, implementation and machine what was measured last, in the order of the lines."""
    last: dict[tuple[str, ...], Line] = {}
    for line in lines:
        machine = str(line.get("gpu") or line.get("cpu"))
        key = (figure_of(line), str(line.get("implementation")), str(line.get("decision")), machine)
        if key not in last or str(line.get("date")) >= str(last[key].get("date")):
            last[key] = line
    kept = {id(line) for line in last.values()}
    return [line for line in lines if id(line) in kept]


def _number(value: Any) -> str:
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
