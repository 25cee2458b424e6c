"""`legato bench skeleton`: an iteration's launches by name, their bytes, and the time of all of them in one graph.

Owns what the terminal shows. Called by `legato.cli.bench_commands`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from legato.bench.launches import GLM_5_2, Launch, Rank, iteration
from legato.bench.record import MEASURED_BANDWIDTH, Setting, append
from legato.bench.skeleton import SkeletonError, measure
from legato.cli.bench import device_named
from legato.cli.preflight import describe
from legato.cli.tables import table
from legato.config import MAX_DRAFTS, ConfigError
from legato.model.spec import ModelSpec


def bench_skeleton(model: str | None, num_ranks: int, num_drafts: int, device_name: str, path: Path | None) -> None:
    """Prints the launches and, where there is a GPU, the time. Raises ConfigError for what cannot be measured."""
    if not 0 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--num-drafts must be between 0 and {MAX_DRAFTS}, got {num_drafts}")
    device = device_named(device_name)
    spec = ModelSpec.from_config(GLM_5_2, name="GLM-5.2") if model is None else describe(model)[1]
    try:
        launches = iteration(Rank(spec, num_ranks), num_drafts)
    except ValueError as error:
        raise ConfigError(f"--gpus {num_ranks}: {error}") from error
    console = Console()
    console.print(_table(launches))
    total = sum(launch.weight_bytes for launch in launches)
    bandwidth = MEASURED_BANDWIDTH["NVIDIA H200"]
    console.print(
        f"{spec.name}, one rank of {num_ranks}, {num_drafts} drafts: {len(launches)} launches, {total / 1e9:.2f} GB of "
        f"weights, {1e3 * total / bandwidth:.2f} ms at the {bandwidth / 1e12:.1f} TB/s of an H200",
        highlight=False,
    )
    if device.type != "cuda":
        console.print("No GPU here: nothing was timed.", style="dim")
        return
    setting = Setting.here(device)
    try:
        figure = measure(launches, device)
    except SkeletonError as error:
        raise ConfigError(str(error)) from error
    fields = figure.fields(setting.gpu, {"model": spec.name, "tp": num_ranks, "k": num_drafts, "format": "nvfp4"})
    spread, percent = figure.spread, fields["roofline_percent"]
    console.print(
        f"{spread.median_us / 1e3:.3f} ms (p20 {spread.p20_us / 1e3:.3f}, p80 {spread.p80_us / 1e3:.3f})"
        + (f", {percent:.0f} % of the roofline" if percent else "")
        + f"; {figure.host_us:.0f} us of host time to launch the graph. {setting.gpu}, {setting.clocks}.",
        highlight=False,
    )
    if path is not None:
        append(path, [fields], setting)


def _table(launches: Sequence[Launch]) -> Table:
    """Launches of one name and size in one row."""
    counts: dict[Launch, int] = {}
    for launch in launches:
        counts[launch] = counts.get(launch, 0) + 1
    shown = table(("launch",), ("rows", "weight", "MB", "times", "GB"))
    for launch, count in counts.items():
        shape = f"{launch.outputs} x {launch.inputs}" if launch.outputs else "none"
        megabytes = launch.weight_bytes / 1e6
        shown.add_row(
            launch.name, str(launch.rows), shape, f"{megabytes:.2f}", str(count), f"{megabytes * count / 1e3:.3f}"
        )
    return shown
