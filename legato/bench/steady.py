"""The steady state without a prompt having run: a runner whose requests stand in the middle of their answers, and its loop.

Owns what is run and when it ended. What runs is the engine's own: weights as loading shards them, runner, graphs, one iteration
in flight. Knows no figure. Called by `legato.bench.slice`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from legato.bench.share import Share
from legato.bench.synthetic import Standing, stand
from legato.config import (
    MAX_DRAFTS,
    PAGE_SIZE,
    CacheConfig,
    Config,
    ConfigError,
    ExecutionConfig,
    ScheduleConfig,
    Switch,
    resolve,
)
from legato.plan import Plan
from legato.runtime.cache import CacheLayout
from legato.runtime.runner import Flight, Runner

OTHERS = 8
"""Iterations besides those that are timed: warm-up, the profiler's, and the one that counts experts."""
_RESERVE_BYTES = 5 << 30
"""Left free for graphs, scores and what an iteration allocates."""
_FEWEST_LATENTS = 8
"""Between two uses of a latent cache lie the weights of so many layers, more than the L2 cache holds."""


class SliceError(RuntimeError):
    """What was timed is not the work that was asked for; the message says in what."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an iteration is made of: `batch` requests of `context` tokens, `num_drafts` drafts each, timed `iterations` times.

    `distinct_experts` is what the weights were drawn for (`None`: a checkpoint's); `latent` and `ops` are settings of the engine.
    """

    batch: int
    context: int
    num_drafts: int
    iterations: int
    distinct_experts: float | None
    latent: str
    ops: Mapping[str, str]

    @property
    def fields(self) -> dict[str, float | None]:
        """What an iteration is made of, as a line of a record names it."""
        return {
            "batch": self.batch,
            "context": self.context,
            "k": self.num_drafts,
            "distinct_experts": self.distinct_experts,
        }


@dataclass(frozen=True, slots=True)
class Steady:
    """A runner with its requests standing, and the plan under which all of them decode."""

    runner: Runner
    plan: Plan

    @property
    def how(self) -> str:
        """ "graph", "eager" or "cpu"."""
        decoder = self.runner.decoder
        if decoder is None:
            return "cpu"
        bucket = decoder.seats.seat(self.plan.decodes)
        return "graph" if decoder.key(bucket, "greedy") in decoder.graphs else "eager"


@dataclass(frozen=True, slots=True)
class Run:
    """Of some iterations: microseconds between their ends, of host time to launch each, and tokens emitted in all."""

    ends: list[float]
    launches: list[float]
    emitted: int


def steady(
    share: Share, work: Work, device: torch.device, extra_iterations: int = 0, graphs: Switch = "auto"
) -> Steady:
    """A runner with room for the requests and for every iteration that is to come (`extra_iterations` besides those of `work`),
    its graph where there is a GPU and `graphs` is not off, and the requests in it.

    Raises:
        ConfigError: the engine refuses a setting, or the caches do not fit.
    """
    iterations = work.iterations + OTHERS + extra_iterations
    standing = Standing(work.batch, work.context, headroom=iterations * (work.num_drafts + 1))
    gc.collect()  # what ran before is in cycles, and memory is counted
    runner = _runner(share, work, standing, device, graphs)
    decoder = runner.decoder
    if decoder is not None and runner.settings.graphs:
        with torch.inference_mode():
            decoder.capture(decoder.key(decoder.buckets[-1], "greedy"))
    stand(runner, standing)
    return Steady(runner, Plan(1, (), (), standing.rows, num_drafts=work.num_drafts))


def pack(share: Share, work: Work, device: torch.device) -> None:
    """Runs an iteration, so that weights are in the form that it reads before memory for caches is counted: they are packed when
    they are first used."""
    first = Standing(1, PAGE_SIZE, headroom=OTHERS * (work.num_drafts + 1))
    stand(_runner(share, replace(work, batch=1), first, device, "off"), first)


def _runner(share: Share, work: Work, standing: Standing, device: torch.device, graphs: Switch) -> Runner:
    """With room for what stands there, and as many latent caches as fit."""
    context = standing.pages_each * PAGE_SIZE - MAX_DRAFTS
    config = Config(
        num_drafts=work.num_drafts,
        cache=CacheConfig(tokens=(standing.num_pages - 1) * PAGE_SIZE, latent=work.latent),  # type: ignore[arg-type]
        schedule=ScheduleConfig(max_running=standing.batch, context=context),
        execution=ExecutionConfig(device=str(device), ops=work.ops, graphs=graphs),
    )
    settings = resolve(
        config,
        max_position=max(share.spec.max_position, context),
        has_mtp=share.spec.has_mtp,
        cuda_available=torch.cuda.is_available(),
    )
    layout = CacheLayout(share.spec, settings.latent, settings.index)
    num_latents = _latents_that_fit(layout, settings.num_pages, device)
    caches = layout.allocate_in_turn(settings.num_pages, settings.device, num_latents)
    return Runner(share.spec, share.weights, settings, share.communicator, caches)


def loop(steady: Steady, iterations: int, in_flight: int = 1) -> Run:
    """Runs iterations, so many of them in flight while the next is launched: one in the engine, none where overlap is off. Two
    go before, untimed.

    Raises:
        SliceError: a request came to an end while it was timed.
    """
    clock = _Clock(steady.runner.rows.tokens.device)
    launches: list[float] = []
    emitted: list[int] = []
    began = time.perf_counter()
    for tokens in turns(steady, iterations + 2, in_flight):
        if tokens is None:  # launched
            launches.append(1e6 * (time.perf_counter() - began))
            clock.mark()
        else:
            emitted.append(tokens)
        began = time.perf_counter()
    return Run(clock.intervals()[1:], launches[2:], sum(emitted[2:]))


def turns(steady: Steady, iterations: int, in_flight: int = 1) -> Iterator[int | None]:
    """The loop itself: yields `None` after each launch, and the number of tokens emitted after each settled iteration.

    Raises:
        SliceError: a request came to an end.
    """
    flights: list[Flight] = []
    for _ in range(iterations):
        flights.append(steady.runner.launch(steady.plan))
        yield None
        while len(flights) > in_flight:
            yield _emitted(flights.pop(0))
    yield from map(_emitted, flights)


def _emitted(flight: Flight) -> int:
    emissions = flight.outcome().emissions
    for emission in emissions:
        if emission.done:
            raise SliceError(f"row {emission.row} came to an end while it was timed")
    return sum(len(emission.tokens) for emission in emissions)


def _latents_that_fit(layout: CacheLayout, num_pages: int, device: torch.device) -> int:
    """How many layers can have a latent cache of their own; the others use these in turn.

    Raises:
        ConfigError: so few fit that the L2 cache would hold what a layer left there, which no real iteration finds.
    """
    if device.type != "cuda":
        return layout.num_layers
    index_bytes = (
        _page_bytes(layout.index_page()) * num_pages * (layout.num_layers - layout.spec.indexer_kinds.count("shared"))
    )
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused - _RESERVE_BYTES - index_bytes
    fitting = free // (_page_bytes(layout.latent_page()) * num_pages)
    if fitting < min(_FEWEST_LATENTS, layout.num_layers):
        raise ConfigError(
            f"--context and --batch: caches of {num_pages * PAGE_SIZE:,} tokens do not fit beside the weights"
        )
    return min(fitting, layout.num_layers)


def _page_bytes(page: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = page
    return math.prod(shape) * dtype.itemsize


class _Clock:
    """Marks behind launched work: events on a GPU, the time of day elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Microseconds between marks that follow one another."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [1e3 * a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [1e6 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]
