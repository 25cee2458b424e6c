"""One rank's share of a model on one device: the iteration's time, without the other ranks.

Owns the figure; what is timed is `legato.bench.steady`'s. Exchanges loop back, and what a group would pay for them is reported
apart. Called by `legato bench slice`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.bench.exchanges import Added, added
from legato.bench.kernels import KernelTime, kernel_times
from legato.bench.record import against_floor
from legato.bench.share import Share
from legato.bench.steady import SliceError, Steady, Work, loop, steady
from legato.bench.timing import Spread
from legato.model.glm import Glm
from legato.model.weights import MoeWeights
from legato.ops import Bindings
from legato.quant.weight import Experts
from legato.runtime.batch import build_batch
from legato.runtime.draw import PlainDraw, choose_greedy


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured.

    Attributes:
        spread: of an iteration, from the end of one to the end of the next.
        host_us: of launching one, median.
        kernels: of one iteration; empty on a CPU.
        experts_reached: by the verifying rows of a sparse layer, on average.
        emitted: tokens per request and iteration, which says nothing of a trained model.
        exchanges: of one iteration; two per layer and pass, and one per pass over the output head.
        exchanged_bytes: that this rank sends each of the others in one iteration.
        added: what they would cost a group.
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
    added: Added
    how: str
    bound: Mapping[str, str]
    peak_bytes: int
    num_latents: int


def measure(share: Share, work: Work, device: torch.device, bound: Bindings) -> Figure:
    """Builds a runner around the weights, sets up the requests and times iterations. `bound`: the ops' implementations, which
    were bound before the weights were made.

    Raises:
        ConfigError: the engine refuses a setting, or the caches do not fit.
        SliceError: a request came to an end while it was timed, or hidden states are not finite.
    """
    standing = steady(share, work, device)
    run, how = loop(standing, work.iterations), standing.how
    runner, plan = standing.runner, standing.plan
    kernels = kernel_times(lambda: runner.launch(plan).outcome()) if device.type == "cuda" else ()
    exchanges = share.communicator.exchanges
    exchanges.clear()
    reached = _experts_reached(standing, share)
    count = exchanges.sums + exchanges.gathers
    return Figure(
        spread=Spread.of(run.ends, "graph" if how == "graph" else "stream" if device.type == "cuda" else "cpu"),
        host_us=statistics.median(run.launches),
        kernels=kernels,
        experts_reached=reached,
        emitted=run.emitted / (work.batch * work.iterations),
        exchanges=count,
        exchanged_bytes=exchanges.num_bytes,
        added=added(count, exchanges.num_bytes, share.communicator.mesh.size),
        how=how,
        bound={name: target for name, target in bound.chosen.items() if target != "reference"},
        num_latents=len({cache.latent.data_ptr() for cache in runner.iteration.caches}),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def fields(share: Share, work: Work, figure: Figure, gpu: str | None, case: Mapping[str, Any]) -> dict[str, Any]:
    """As one line of a record, without the setting and without tokens per second. `case`: what else tells figures apart."""
    # As many experts as were reached: of several requests, drawn weights promise nothing.
    num_bytes = round(share.traffic.iteration(work.batch, work.num_drafts, work.context, figure.experts_reached))
    return {
        "bench": "slice",
        "name": share.spec.name,
        "implementation": figure.how,
        "case": {**share.fields, **case},
        **work.fields,
        "experts_reached": figure.experts_reached,
        **figure.spread.fields,
        "host_us": figure.host_us,
        "iterations": work.iterations,
        "kernels": sum(kernel.calls for kernel in figure.kernels) or None,
        "kernels_us": sum(kernel.total_us for kernel in figure.kernels) or None,
        "exchanges": figure.exchanges,
        "exchanged_bytes": figure.exchanged_bytes,
        "exchanges_modelled_us": figure.added.total,
        "exchanges_measured_us": figure.added.measured,
        "exchanges_reckoned_us": figure.added.reckoned,
        **against_floor(figure.spread.median_us, num_bytes, gpu),
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
        "tokens_per_s_simulated_with_exchanges": 1e6 * accept_length / (microseconds + figure.added.total),
    }


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
def _experts_reached(standing: Steady, share: Share) -> float:
    """Runs one iteration kernel by kernel; the mean number of experts over the sparse layers (0 where there is none)."""
    counts: list[int] = []
    runner = standing.runner
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, experts=_Counting(layer.mlp.experts, counts)))
        if isinstance(layer.mlp, MoeWeights)
        else layer
        for layer in share.weights.layers
    )
    counted = replace(
        runner.iteration, target=Glm(share.spec, replace(share.weights, layers=layers), share.communicator)
    )
    plan = standing.plan
    batch = build_batch(plan, runner.rows, share.spec).within(runner.settings.score_bytes)
    hidden, _ = counted.run(batch, runner.rows, PlainDraw(choose_greedy), plan.num_drafts)
    if not bool(hidden.isfinite().all()):
        raise SliceError("hidden states are not finite: selection and routing were not those of numbers")
    return statistics.fmean(counts) if counts else 0.0


def accept_length_at(accept_length: float, most_drafts: int, num_drafts: int) -> float:
    """What an accept length with `most_drafts` drafts would be with fewer, if each draft behind accepted ones is accepted with
    the same chance: with chance p and K drafts, 1 + p + ... + p^K tokens come out of an iteration.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        low, high = (chance, high) if _tokens(chance, most_drafts) < accept_length else (low, chance)
    return accept_length if num_drafts == most_drafts else _tokens(high, num_drafts)


def _tokens(chance: float, num_drafts: int) -> float:
    return sum(chance**draft for draft in range(num_drafts + 1))
