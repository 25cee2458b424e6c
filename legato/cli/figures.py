"""`legato bench pareto`, `isl` and `timeline`: sweeps with progress, tables, JSON lines.

Owns what the terminal shows. Draws nothing (`legato.cli.pictures` does). Called by `legato.cli.bench_commands`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from legato.bench import isl, lines, pareto, timeline
from legato.bench.load.endpoint import Endpoint
from legato.bench.load.run import Load
from legato.bench.memory import read_bytes_per_s
from legato.bench.record import MEASURED_BANDWIDTH, Setting, append, without_nan
from legato.bench.roofline import Traffic, traffic
from legato.cli.bench import device_named
from legato.cli.tables import table
from legato.config import Config
from legato.engine.start import open_checkpoint
from legato.llm import LLM
from legato.model.checkpoint import Checkpoint

FLOAT32_BYTES = 4


def bench_pareto(
    endpoint: Endpoint, load: Load, sweep: pareto.Sweep, config: Config, arguments: Sequence[str], path: Path
) -> list[dict[str, Any]]:
    """Runs the sweep; returns its points as lines of a record, which are in the file by then."""
    return asyncio.run(_sweep(endpoint, load, sweep, config, arguments, path))


async def _sweep(
    endpoint: Endpoint, load: Load, sweep: pareto.Sweep, config: Config, arguments: Sequence[str], path: Path
) -> list[dict[str, Any]]:
    console = Console()
    # A server elsewhere says nothing of its machine: there is no roofline to draw, and the setting is the client's.
    device = torch.device("cpu") if endpoint.url else device_named(config.execution.device)
    roofline = None
    if not endpoint.url:
        roofline = _roofline(open_checkpoint(config.model), device, config.execution.threads or torch.get_num_threads())
    setting = Setting.here(device)
    rates = ("tokens/s of one", "tokens/s per device", "accept length")
    shown = table((), ("K", "users", *rates, "TTFT p50, ms", "failed"))
    found: list[dict[str, Any]] = []
    async for point in pareto.measure(endpoint, load, sweep, arguments, lambda step: console.print(step, style="dim")):
        line = _pareto_line(point, roofline)
        append(path, [line], setting)
        found.append(line)
        ttft = point.result.summary.ttft.p50
        shown.add_row(
            "-" if point.num_drafts is None else str(point.num_drafts),
            str(point.concurrency),
            _number(point.user_tokens_per_s),
            _number(point.tokens_per_s),
            "-" if point.result.accept is None else f"{point.result.accept.value:.2f}",
            _number(1000 * ttft),
            str(point.result.summary.failed),
        )
    console.print(shown)
    console.print(f"every figure: {path}", style="dim", highlight=False)
    return found


def _roofline(checkpoint: Checkpoint, device: torch.device, threads: int) -> tuple[Traffic, float | None]:
    """What an iteration reads, and bytes per second that memory gives: measured on a CPU; of a GPU what is on record."""
    if device.type == "cuda":
        return traffic(checkpoint), MEASURED_BANDWIDTH.get(torch.cuda.get_device_name(device))
    return traffic(checkpoint, element_bytes=FLOAT32_BYTES), read_bytes_per_s(threads)


def _pareto_line(point: pareto.Point, roofline: tuple[Traffic, float | None] | None) -> dict[str, Any]:
    result, bound = point.result, None
    if roofline is not None and roofline[1] is not None:
        prompts, requests = result.summary.prompt_tokens or 0, result.summary.requests
        context = prompts // requests + result.endpoint.max_tokens // 2
        bound = pareto.bound(roofline[0], roofline[1], point, context)
    line = {
        "bench": "pareto",
        "name": result.endpoint.model,
        "implementation": "http",
        "case": {
            "concurrency": point.concurrency,
            "prompts": result.load.source.label,
            "max_tokens": result.endpoint.max_tokens,
            "temperature": result.endpoint.temperature,
        },
        "batch": point.concurrency,
        "k": point.num_drafts,
        "median_us": 1e6 * point.iteration_s,
        "user_tokens_per_s": point.user_tokens_per_s,
        "tokens_per_s_per_device": point.tokens_per_s,
        "accept_length": None if result.accept is None else result.accept.value,
        "accept_length_simulated": False,
        "random_prompts": result.load.source.is_random,
        "roofline": None
        if bound is None
        else {"user_tokens_per_s": bound.user_tokens_per_s, "tokens_per_s_per_device": bound.tokens_per_s},
        "roofline_bytes_per_s": None if roofline is None else roofline[1],
        "correct": None,
        "summary": result.summary.fields(),
    }
    return without_nan(line)


def bench_isl(config: Config, lengths: Sequence[int], output_tokens: int, path: Path) -> list[dict[str, Any]]:
    """Measures length by length; returns the points as lines of a record, which are in the file by then."""
    console = Console()
    llm = LLM(config=config)
    device = torch.device(llm.settings.device)
    setting = Setting.here(device)
    read, rate = _roofline(llm.checkpoint, device, torch.get_num_threads())
    columns = ("prompt", "first token, s", "ms per iteration", "% of roofline", "accept length", "tokens/s")
    shown = table((), columns)
    found: list[dict[str, Any]] = []
    for point in isl.measure(
        llm, lengths, output_tokens, read, rate, lambda n: console.print(f"{n} tokens", style="dim")
    ):
        line = point.fields(llm)
        append(path, [line], setting)
        found.append(line)
        shown.add_row(
            str(point.input_tokens),
            f"{point.prefill_s:.2f}",
            f"{1e3 * point.iteration_s:.2f}",
            "-" if point.floor_s is None else f"{100 * point.floor_s / point.iteration_s:.0f}",
            f"{point.accept_length:.2f}",
            f"{point.tokens_per_s:.1f}",
        )
    console.print(shown)
    console.print(f"every figure: {path}", style="dim", highlight=False)
    return found


def bench_timeline(paths: Sequence[Path]) -> list[timeline.Series]:
    """The table of figures that were recorded more than once, largest gain first."""
    console = Console()
    found = timeline.series(lines.read(paths, lambda left_out: console.print(left_out, style="dim", highlight=False)))
    if not found:
        console.print("No figure has been recorded twice yet: there is no history to show.")
        return found
    shown = table(("figure",), ("first", "us", "last", "us", "times as fast"))
    for row in found:
        (first, _, before), (last, _, now) = row.points[0], row.points[-1]
        shown.add_row(row.name, _when(first), f"{before:.1f}", _when(last), f"{now:.1f}", f"{row.speedup:.2f}")
    console.print(shown)
    return found


def _when(date: str) -> str:
    return date[:16].replace("T", " ")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
