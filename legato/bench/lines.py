"""Reading measurements back: JSON lines from files and folders, by benchmark.

Owns the errors of a damaged record. Called by the plots' commands, `legato bench report` and `legato bench timeline`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from legato.config import ConfigError

Line = Mapping[str, Any]


def read(paths: Sequence[Path]) -> list[Line]:
    """Every line of the files, and of the `*.jsonl` below the folders, in order; each carries its `file`.

    Raises:
        ConfigError: a path is missing, or a line is no measurement; the message names file and line.
    """
    found: list[Line] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            found += _lines(file)
    if not found:
        raise ConfigError(f"no measurements (*.jsonl) in {', '.join(map(str, paths))}")
    return found


def _lines(file: Path) -> list[Line]:
    found: list[Line] = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            value: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: is not JSON ({error})") from error
        if not isinstance(value, dict) or "bench" not in value:
            raise ConfigError(f"{file}, line {number}: is no measurement: it does not say which bench")
        found.append({**cast("dict[str, Any]", value), "file": str(file)})
    return found


def of(lines: Sequence[Line], bench: str) -> list[Line]:
    """The lines of one benchmark that are figures: of `serve`, the runs and not their requests."""
    return [line for line in lines if line["bench"] == bench and "request" not in line]
