"""Recording the steady state: requests that decode, a profile of some iterations, and what it says.

Owns what is run. Knows no terminal. Called by `legato bench trace`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from legato.bench.trace import Figures, Share, Trace, figures, shares
from legato.bench.trace_page import View, page
from legato.config import Config, ConfigError
from legato.engine.loop import Engine
from legato.engine.start import open_checkpoint, start
from legato.schedule import Request
from legato.types import SamplingParams

SETTLING = 12
"""Iterations before anything is counted."""
TIMED = 100
"""Iterations that are timed without the profiler, at most."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is recorded: `batch` requests of `context` tokens each that decode for `iterations`, greedily or at `temperature`."""

    batch: int
    context: int
    iterations: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was found. `turn_us`: the wall-clock time of a turn while nothing was recorded; `waits` and `allocations`: calls in
    which the host waited for the device, or took memory of it, the one of the profiler's own end left out."""

    figures: Figures
    shares: tuple[Share, ...]
    turn_us: float
    waits: dict[str, int]
    allocations: dict[str, int]
    accept_length: float

    def fields(self, wanted: Wanted, num_drafts: int) -> dict[str, Any]:
        """As one line of a record."""
        return {
            "bench": "trace",
            "name": "iteration",
            "implementation": "graph",
            "case": {
                "batch": wanted.batch,
                "context": wanted.context,
                "k": num_drafts,
                "temperature": wanted.temperature,
            },
            **self.figures.fields(),
            "turn_us": self.turn_us,
            "waits": self.waits,
            "allocations": self.allocations,
            "accept_length": self.accept_length,
            "accept_length_simulated": False,
            "correct": None,
        }


def record(config: Config, wanted: Wanted, folder: Path, conditions: str) -> tuple[Recorded, int]:
    """Runs it and writes `trace.json.gz` (for Perfetto or chrome://tracing) and `trace.html` into `folder`.

    Returns what was found, and the number of drafts.

    Raises:
        ConfigError: the engine decodes without graphs here, or the requests would not last.
    """
    started = start(config, open_checkpoint(config.model))
    settings = started.settings
    if not settings.graphs:
        raise ConfigError(f"a trace is read by its graphs, and device {settings.device} runs none: use --device cuda")
    timed = min(TIMED, wanted.iterations)
    most = (SETTLING + timed + wanted.iterations + 8) * (settings.num_drafts + 1)
    if wanted.context + most > settings.context or wanted.batch > settings.max_running:
        raise ConfigError(
            f"{wanted.batch} requests of {wanted.context} tokens that decode {most} more need --context {wanted.context + most} "
            f"(it is {settings.context}) and --max-running {wanted.batch} (it is {settings.max_running})"
        )
    engine, drawn = started.engine, random.Random(0)
    for index in range(wanted.batch):
        prompt = tuple(drawn.randrange(started.spec.vocab_size) for _ in range(wanted.context))
        params = SamplingParams(max_tokens=most, temperature=wanted.temperature)
        engine.submit(Request(f"trace{index}", prompt, params, (), index))
    _turn_until(engine, lambda: engine.stats.prompt_tokens >= wanted.batch * wanted.context)
    _turn(engine, SETTLING)
    engine.reset_stats()
    began = time.perf_counter()
    _turn(engine, timed)
    turn_us = 1e6 * (time.perf_counter() - began) / timed
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        _turn(engine, wanted.iterations)
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    trace = Trace.of(profiled.profiler.kineto_results.events())
    iterations = trace.iterations()
    folder.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(folder / "trace.json.gz"))
    waits = trace.waits()
    waits["cudaDeviceSynchronize"] -= 1  # the profiler's, when it ends
    found = Recorded(
        figures=figures(trace),
        shares=tuple(shares(iterations)),
        turn_us=turn_us,
        waits=dict(+waits),
        allocations=dict(trace.allocations()),
        accept_length=engine.stats.accept_length,
    )
    middle = iterations[len(iterations) // 2]
    title = f"{started.checkpoint.label}: {wanted.batch} requests at {wanted.context} tokens, K = {settings.num_drafts}"
    text = page(title, conditions, [View("", found.figures, middle, found.shares)])
    (folder / "trace.html").write_text(text, encoding="utf-8")
    return found, settings.num_drafts


def _turn(engine: Engine, turns: int) -> None:
    for _ in range(turns):
        engine.turn()


def _turn_until(engine: Engine, is_done: Callable[[], bool]) -> None:
    while not is_done():
        engine.turn()
    torch.cuda.synchronize()
