"""What a measured figure must carry: the machine it was taken on and the code that it measured.

Owns the format of `records/*/*.jsonl`: one JSON object per line. Knows no benchmark. Called by every module of
`legato.bench`.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

#: Bytes per second that a streaming kernel reaches at most, as measured (the data sheet says 4.8 TB/s for the H200).
MEASURED_BANDWIDTH = {"NVIDIA H200": 4.3e12}
#: Dense bfloat16 operations per second of a large matrix product, as measured.
MEASURED_BF16_FLOPS = {"NVIDIA H200": 790e12}


@dataclass(frozen=True)
class Setting:
    """Where, when and on what code a figure was taken. `gpu`, `driver` and `clocks` are None on a CPU, `commit` and
    `dirty` outside a git checkout."""

    gpu: str | None
    driver: str | None
    clocks: str | None
    commit: str | None
    dirty: bool | None
    command: str
    date: str

    @property
    def machine(self) -> str:
        """The GPU and its clocks, for the terminal."""
        return f"{self.gpu or 'CPU'}{', ' + self.clocks if self.clocks else ''}"

    @staticmethod
    def here(device: torch.device) -> Setting:
        """The setting of this process, measuring on `device`."""
        commit = _answer("git", "rev-parse", "HEAD")
        changed = _answer("git", "status", "--porcelain", "--untracked-files=no")
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return Setting(
            gpu=gpu,
            driver=_smi("driver_version", device),
            clocks=_clocks(device),
            commit=commit,
            dirty=None if commit is None else bool(changed),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def floor_us(gpu: str | None, num_bytes: int, flops: int) -> float | None:
    """The shortest time, in microseconds, in which a GPU can move `num_bytes` and do `flops` bfloat16 operations; None
    for a GPU whose rates were not measured."""
    if gpu not in MEASURED_BANDWIDTH:
        return None
    return 1e6 * max(num_bytes / MEASURED_BANDWIDTH[gpu], flops / MEASURED_BF16_FLOPS[gpu])


def against_floor(median_us: float, num_bytes: int, gpu: str | None) -> dict[str, float | None]:
    """What had to be read, in how long that can be done, and how much of that speed was reached: as a line of a record names
    them."""
    floor = floor_us(gpu, num_bytes, 0)
    return {"bytes": num_bytes, "floor_us": floor, "roofline_percent": 100 * floor / median_us if floor else None}


def append(path: Path, figures: Iterable[Mapping[str, Any]], setting: Setting) -> None:
    """Appends one line per figure, each with the setting, to a JSON-lines file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for figure in figures:
            line = without_nan({**figure, **asdict(setting)})
            file.write(json.dumps(line, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """The same value with `None` for every NaN: JSON has none."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in cast("list[Any]", value)]
    return None if isinstance(value, float) and math.isnan(value) else value


def _answer(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _smi(field: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return _answer("nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={field}", "--format=csv,noheader")


def _clocks(device: torch.device) -> str | None:
    """Clocks as found, e.g. "sm 1980 MHz of 1980 MHz, memory 3201 MHz"."""
    found = _smi("clocks.sm,clocks.max.sm,clocks.mem", device)
    if found is None:
        return None
    now, most, memory = found.split(", ")
    return f"sm {now} of {most}, memory {memory}"
