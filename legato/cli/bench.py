"""`legato bench`: tables of measured figures on the terminal, and the same as JSON lines in a file.

Owns what the terminal shows. Called by `legato.__main__`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from legato.bench.collective import measure_ranks
from legato.bench.ops import BenchError, Figure, chosen, measure
from legato.bench.record import MEASURED_BANDWIDTH, Setting, append
from legato.cli.tables import table
from legato.config import ConfigError

_NUMBERS = ("us", "p20", "p80", "isolated", "GB/s", "% roofline")


def device_named(name: str) -> torch.device:
    """The device to measure on; "auto" is the GPU where there is one.

    Raises ConfigError where a GPU was asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: PyTorch sees no GPU here; use --device cpu to time the references")
    return device


def bench_ops(
    folders: Sequence[str], implementation: str, pattern: str, device_name: str, path: Path | None
) -> list[dict[str, Any]]:
    """Times cases of ops and prints a line each. Returns the lines as `path` gets them, wrong results among them."""
    console = Console()
    device = device_named(device_name)
    setting = Setting.here(device)
    try:
        listed = chosen(folders, pattern, device)
        figures = measure(listed, implementation, device)
    except BenchError as error:
        raise ConfigError(str(error)) from error
    console.print(_heading(setting, device), style="dim", highlight=False)
    lines: list[dict[str, Any]] = []
    for op, of_one_op in itertools.groupby(figures, lambda figure: figure.case.op.name):
        shown = table((op,), _NUMBERS, "")
        for figure in of_one_op:
            lines.append(figure.fields(setting.gpu))
            shown.add_row(*_cells(figure, setting.gpu))
            if path is not None:
                append(path, lines[-1:], setting)
        console.print(shown)
    return lines


def bench_ranks(folders: Sequence[str], num_ranks: int, path: Path | None) -> bool:
    """Times the sum over ranks of `ops/reduce` on as many GPUs and prints a line for each way. False if one was wrong."""
    if list(folders) != ["reduce"]:
        raise ConfigError("--ranks: ranks meet in the folder reduce only: legato bench ops reduce --ranks N")
    console, setting = Console(), Setting.here(device_named("cuda"))
    try:
        figures = measure_ranks(num_ranks)
    except BenchError as error:
        raise ConfigError(str(error)) from error
    console.print(
        f"{num_ranks} x {setting.gpu}, driver {setting.driver}, {setting.clocks}", style="dim", highlight=False
    )
    listed = table(("", "", "by"), ("rows", "us", "p20", "p80", "p99"))
    for figure in figures:
        times = (figure.median_us, figure.p20_us, figure.p80_us, figure.p99_us)
        shown = [f"{us:.2f}" for us in times] if figure.fault is None else [f"WRONG: {figure.fault}"]
        where = figure.where if figure.where == "alone" else f"added to a {figure.where}"
        listed.add_row(figure.op, where, figure.implementation, str(figure.rows), *shown)
        if path is not None:
            append(path, [figure.fields()], setting)
    console.print(listed)
    return all(figure.fault is None for figure in figures)


def _heading(setting: Setting, device: torch.device) -> str:
    if device.type != "cuda":
        return "No GPU: times of the references on this CPU, without a roofline. Production shapes need a GPU."
    rate = MEASURED_BANDWIDTH.get(setting.gpu or "")
    roofline = (
        f"roofline at {rate / 1e12:.1f} TB/s, as measured" if rate else "no roofline: its rates were not measured"
    )
    return f"{setting.gpu}, driver {setting.driver}, {setting.clocks}; {roofline}. Replays of a graph, inputs rotated past L2."


def _cells(figure: Figure, gpu: str | None) -> list[str]:
    case = figure.case.name.removeprefix(figure.case.op.name).strip()
    if figure.chain is None:
        return [case, *("" for _ in _NUMBERS), f"{figure.implementation} WRONG: {figure.fault}"]
    chain, isolated, percent = figure.chain, figure.isolated, figure.fields(gpu)["roofline_percent"]
    notes = [figure.implementation]
    notes += [f"{figure.kernels} kernels"] if (figure.kernels or 0) > 1 else []
    notes += [chain.method] if chain.method == "stream" else []
    notes += [] if figure.cold or gpu is None else ["in L2"]
    return [
        case,
        f"{chain.median_us:.2f}",
        f"{chain.p20_us:.2f}",
        f"{chain.p80_us:.2f}",
        f"{isolated.median_us:.2f}" if isolated else "",
        f"{figure.case.bytes / chain.median_us / 1e3:.0f}" if figure.case.bytes else "",
        f"{percent:.0f}" if percent is not None else "",
        ", ".join(notes),
    ]
