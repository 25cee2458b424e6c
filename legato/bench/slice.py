"""One rank's share of a model on one device: the iteration's time, without the other ranks.

Owns the state that is timed and the figures. What runs is the engine's own: weights as loading shards them, runner, graphs,
the loop with one iteration in flight. Exchanges loop back, and what a group would pay for them is modelled and reported apart.
Called by `legato bench slice`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.bench.kernels import KernelTime, kernel_times
from legato.bench.record import floor_us
from legato.bench.share import Share
from legato.bench.synthetic import Standing, stand
from legato.bench.timing import Spread
from legato.config import (
    MAX_DRAFTS,
    PAGE_SIZE,
    CacheConfig,
    Config,
    ConfigError,
    ExecutionConfig,
    ScheduleConfig,
    resolve,
)
from legato.model.glm import Glm
from legato.model.weights import MoeWeights
from legato.ops import Bindings
from legato.plan import Plan
from legato.quant.weight import Experts
from legato.runtime.batch import build_batch
from legato.runtime.cache import CacheLayout
from legato.runtime.draw import PlainDraw, choose_greedy
from legato.runtime.runner import Runner

MODELLED_EXCHANGE_US = 5.0
"""Of one exchange between 8 ranks, until it has been measured; two per layer and pass, and one per pass over the output head."""


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


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured.

    Attributes:
        spread: of an iteration, from the end of one to the end of the next.
        host_us: of launching one, median.
        kernels: of one iteration; empty on a CPU.
        experts_reached: by the verifying rows of a sparse layer, on average.
        emitted: tokens per request and iteration, which says nothing of a trained model.
        exchanges: of one iteration.
        exchanged_bytes: that this rank sends in one iteration.
        how: "graph", "eager" or "cpu".
        bound: op -> implementation, where it is not the reference.
        peak_bytes: of device memory.
        num_latents: latent caches; where they are fewer than layers, layers use them in turn.
    """

    spread: Spread
    host_us: float
    kernels: tuple[KernelTime, ...]
    experts_reached: float
    emitted: float
    exchanges: int
    exchanged_bytes: int
    how: str
    bound: Mapping[str, str]
    peak_bytes: int
    num_latents: int

    @property
    def modelled_us(self) -> float:
        """What the exchanges would cost a group."""
        return self.exchanges * MODELLED_EXCHANGE_US


def measure(share: Share, work: Work, device: torch.device, bound: Bindings) -> Figure:
    """Builds a runner around the weights, sets up the requests and times iterations. `bound`: the ops' implementations, which
    were bound before the weights were made.

    Raises:
        ConfigError: the engine refuses a setting, or the caches do not fit.
        SliceError: a request came to an end while it was timed, or hidden states are not finite.
    """
    runner, standing = _runner(share, work, device)
    stand(runner, standing)
    plan = Plan(1, (), (), standing.rows)
    how = "cpu"
    if runner.decoder is not None:
        bucket = runner.decoder.seats.seat(standing.rows)
        how = "graph" if runner.decoder.has_graph(bucket, "greedy") else "eager"
    ends, launches, emitted = _loop(runner, plan, work.iterations, device)
    kernels = kernel_times(lambda: runner.launch(plan).outcome()) if device.type == "cuda" else ()
    exchanges = share.communicator.exchanges
    exchanges.clear()
    reached = _experts_reached(runner, share, plan)
    return Figure(
        spread=Spread.of(ends, "graph" if how == "graph" else "stream" if device.type == "cuda" else "cpu"),
        host_us=statistics.median(launches),
        kernels=kernels,
        experts_reached=reached,
        emitted=emitted / (work.batch * work.iterations),
        exchanges=exchanges.sums + exchanges.gathers,
        exchanged_bytes=exchanges.num_bytes,
        how=how,
        bound={name: target for name, target in bound.chosen.items() if target != "reference"},
        num_latents=len({cache.latent.data_ptr() for cache in runner.iteration.caches}),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def fields(share: Share, work: Work, figure: Figure, gpu: str | None, case: Mapping[str, Any]) -> dict[str, Any]:
    """As one line of a record, without the setting and without tokens per second. `case`: what else tells figures apart."""
    mesh = share.communicator.mesh
    # As many experts as were reached: of several requests, drawn weights promise nothing.
    num_bytes = round(share.traffic.iteration(work.batch, work.num_drafts, work.context, figure.experts_reached))
    floor = floor_us(gpu, num_bytes, 0)
    return {
        "bench": "slice",
        "name": share.spec.name,
        "implementation": figure.how,
        "case": {"tp": mesh.size, "rank": mesh.rank, "layers": share.spec.num_layers, **case},
        "batch": work.batch,
        "context": work.context,
        "k": work.num_drafts,
        "distinct_experts": work.distinct_experts,
        "experts_reached": figure.experts_reached,
        "median_us": figure.spread.median_us,
        "p20_us": figure.spread.p20_us,
        "p80_us": figure.spread.p80_us,
        "host_us": figure.host_us,
        "iterations": work.iterations,
        "kernels": sum(kernel.calls for kernel in figure.kernels) or None,
        "kernels_us": sum(kernel.total_us for kernel in figure.kernels) or None,
        "exchanges": figure.exchanges,
        "exchanged_bytes": figure.exchanged_bytes,
        "exchanges_modelled_us": figure.modelled_us,
        "exchange_us_assumed": MODELLED_EXCHANGE_US,
        "bytes": num_bytes,
        "floor_us": floor,
        "roofline_percent": 100 * floor / figure.spread.median_us if floor else None,
        "peak_bytes": figure.peak_bytes or None,
        "bound": dict(figure.bound),
        "context_synthetic": True,
        "latent_caches": figure.num_latents,
        "correct": None,  # one rank's share: what the tokens are is the tests' business
    }


def simulated(figure: Figure, accept_length: float) -> dict[str, Any]:
    """Tokens per second of one request if so many tokens came out of every iteration; both with and without the exchanges."""
    microseconds = figure.spread.median_us
    return {
        "accept_length": accept_length,
        "accept_length_simulated": True,
        "tokens_per_s_simulated": 1e6 * accept_length / microseconds,
        "tokens_per_s_simulated_with_exchanges": 1e6 * accept_length / (microseconds + figure.modelled_us),
    }


def _runner(share: Share, work: Work, device: torch.device) -> tuple[Runner, Standing]:
    """A runner with room for the requests and for every iteration that is to come, and its graph where there is a GPU."""
    standing = Standing(work.batch, work.context, headroom=(work.iterations + _OTHERS) * (work.num_drafts + 1))
    context = standing.pages_each * PAGE_SIZE - MAX_DRAFTS
    config = Config(
        num_drafts=work.num_drafts,
        cache=CacheConfig(tokens=(standing.num_pages - 1) * PAGE_SIZE, latent=work.latent),  # type: ignore[arg-type]
        schedule=ScheduleConfig(max_running=work.batch, context=context),
        execution=ExecutionConfig(device=str(device), ops=work.ops),
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
    runner = Runner(share.spec, share.weights, settings, share.communicator, caches)
    decoder = runner.decoder
    if decoder is not None and settings.graphs:
        with torch.inference_mode():
            decoder.capture(decoder.key(decoder.buckets[-1], "greedy"))
    return runner, standing


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


_RESERVE_BYTES = 12 << 30
"""Left free for packed weights, graphs and scores."""
_FEWEST_LATENTS = 8
"""Between two uses of a latent cache lie the weights of so many layers, more than the L2 cache holds."""
_OTHERS = 8
"""Iterations besides those that are timed: warm-up, the profiler's, and the one that counts experts."""


def _loop(runner: Runner, plan: Plan, iterations: int, device: torch.device) -> tuple[list[float], list[float], int]:
    """Microseconds between the ends of iterations, of host time to launch one, and tokens emitted in all.

    One iteration is in flight while the next is launched, as in the engine. Two go before, untimed.
    """
    clock = _Clock(device)
    launches: list[float] = []
    emitted, before = 0, None
    for iteration in range(iterations + 2):
        began = time.perf_counter()
        flight = runner.launch(plan)
        launches.append(1e6 * (time.perf_counter() - began))
        clock.mark()
        if before is not None:
            emitted += _emitted(before.outcome().emissions, iteration >= 2)
        before = flight
    assert before is not None
    emitted += _emitted(before.outcome().emissions, True)
    return clock.intervals()[1:], launches[2:], emitted


def _emitted(emissions: Any, counts: Any) -> int:
    for emission in emissions:
        if emission.done:
            raise SliceError(f"row {emission.row} came to an end while it was timed")
    return sum(len(emission.tokens) for emission in emissions) if counts else 0


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


class _Counting:
    """Experts that note how many of them were chosen in each call."""

    def __init__(self, experts: Experts, counts: list[int]) -> None:
        self._experts, self._counts = experts, counts

    def moe(self, x: Tensor, ids: Tensor, *others: Any, **named: Any) -> Tensor:
        self._counts.append(int(ids[ids >= 0].unique().numel()))
        return self._experts.moe(x, ids, *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


@torch.inference_mode()
def _experts_reached(runner: Runner, share: Share, plan: Plan) -> float:
    """Runs one iteration kernel by kernel; the mean number of experts over the sparse layers (0 where there is none)."""
    counts: list[int] = []
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, experts=_Counting(layer.mlp.experts, counts)))
        if isinstance(layer.mlp, MoeWeights)
        else layer
        for layer in share.weights.layers
    )
    counted = replace(
        runner.iteration, target=Glm(share.spec, replace(share.weights, layers=layers), share.communicator)
    )
    batch = build_batch(plan, runner.rows, share.spec, runner.settings.num_drafts)
    hidden, _ = counted.run(batch.within(runner.settings.score_bytes), runner.rows, PlainDraw(choose_greedy))
    if not bool(hidden.isfinite().all()):
        raise SliceError("hidden states are not finite: selection and routing were not those of numbers")
    return statistics.fmean(counts) if counts else 0.0
