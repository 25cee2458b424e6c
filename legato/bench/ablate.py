"""What each design decision is worth: the iteration with one of them taken away, beside what was published about it.

Owns what is taken away and how. Nothing has a second loop: graphs are cut, ops are bound to other implementations, weights are
drawn in other formats, and what runs is the engine. Called by `legato bench ablate`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from legato.bench.share import Share
from legato.bench.split import split, without_graphs
from legato.bench.steady import Steady, Work, loop, steady
from legato.bench.timing import Spread
from legato.model.mtp import Mtp
from legato.model.step import LayerCache, Selection, Step
from legato.ops import BindError, bind
from legato.ops.op import TESTED_TARGETS
from legato.runtime.decode import Decoder

WHOLE = "as it is"
REPLAYS = 20
"""Of the graph of the chain, to time a draft step."""
T = TypeVar("T")

#: What the authors of SGLang's GLM-5.2 path (v0.5.15.post1, 8xB300 and 4xGB300) report, by decision, in our words.
CLAIMS = {
    "overlap": "the host prepares the next step while this one runs: +11 % end to end",
    "one graph": "nothing waits between draft, verification and draft-extend: part of the same +11 %",
    "IndexShare": "draft steps reuse one selection: a draft step up to 1.9 times as fast at long context",
    "top-k": "a selection instead of a sort: 2.33 times as fast at 80K, 10.17 times at 1M (6 rows, the kernel alone)",
    "prologue": "12 kernels became 4: +8 % at batch 1, about +5 % at batch 128",
    "GEMM": "a warp-specialised kernel: faster than cuBLAS at several batch sizes",
    "draft weights": "not published there: MTP experts, input projection and drafts' head in fewer bits",
}

#: Ops bound to something else, by decision: what it is called, and the overrides.
OTHER_OPS: Mapping[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "top-k": (
        ("torch.topk and a sort", {"top_k": "torch_topk"}),
        ("clusters over 16-bit bins", {"top_k": "sm90_clusters"}),
    ),
    "prologue": (
        (
            "PyTorch, operation by operation",
            {"prologue_full": "reference", "prologue_shared": "reference", "linear_bf16_normed": "cublas"},
        ),
    ),
    "GEMM": (("PyTorch's library (cuBLAS)", {"gemm": "cublas"}),),
}


@dataclass(frozen=True, slots=True)
class Ablation:
    """One way in which the iteration was run.

    Attributes:
        decision: what was taken away, a key of `CLAIMS`; `WHOLE` for nothing.
        variant: what was there in its place.
        context: tokens of each request.
        spread: of an iteration.
        whole_us: of an iteration with nothing taken away, in the same state.
        draft_step_us: of one step of the drafts' chain, where it is a graph of its own.
    """

    decision: str
    variant: str
    context: int
    spread: Spread
    whole_us: float
    draft_step_us: float | None = None

    @property
    def times(self) -> float:
        """How much longer an iteration is."""
        return self.spread.median_us / self.whole_us

    def line(self, share: Share, work: Work, case: Mapping[str, Any]) -> dict[str, Any]:
        """As one line of a record, without the setting."""
        mesh = share.communicator.mesh
        return {
            "bench": "ablate",
            "name": share.spec.name,
            "implementation": self.variant,
            "decision": self.decision,
            "claim": CLAIMS.get(self.decision),
            "case": {"tp": mesh.size, "layers": share.spec.num_layers, **case},
            "batch": work.batch,
            "context": self.context,
            "k": work.num_drafts,
            "distinct_experts": work.distinct_experts,
            **self.spread.fields,
            "whole_us": self.whole_us,
            "times": self.times,
            "draft_step_us": self.draft_step_us,
            "iterations": work.iterations,
            "context_synthetic": True,
            "correct": None,  # speed alone: what the implementations give is checked case by case
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured: `work` with each decision of `decisions` taken away; `contexts` for those that depend on the length;
    `draw` makes the share with the drafts' weights as named (stored or lean), and is called again for another; `targets` as for
    `bind`."""

    work: Work
    decisions: Sequence[str]
    contexts: Sequence[int]
    draw: Callable[[str], Share]
    targets: Sequence[str]
    device: torch.device


def measure(asked: Asked) -> Iterator[tuple[Share, Ablation]]:
    """Figures as they are measured, the whole one first. Variants that need a GPU are left out on a CPU."""
    bind(asked.targets, dict(asked.work.ops))
    share = asked.draw("stored")
    whole, found = _schedules(share, asked)
    yield share, whole
    for one in found:
        yield share, one
    if "IndexShare" in asked.decisions and asked.work.num_drafts > 1:
        for context in asked.contexts:
            for one in _index_share(share, replace(asked.work, context=context), asked.device):
                yield share, one
    for one in _other_ops(share, asked, whole.spread.median_us):
        yield share, one
    if "draft weights" in asked.decisions and asked.work.num_drafts:
        del share
        gc.collect()
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()
        yield _lean(asked, whole.spread.median_us)


def _lean(asked: Asked, whole_us: float) -> tuple[Share, Ablation]:
    share = asked.draw("lean")
    spread = _spread(loop(steady(share, asked.work, asked.device), asked.work.iterations).ends, asked.device)
    return share, Ablation("draft weights", "fewer bits", asked.work.context, spread, whole_us)


def _schedules(share: Share, asked: Asked) -> tuple[Ablation, list[Ablation]]:
    """The whole iteration, then the ways in which the host may be in its way: all in one state, one after the other."""
    work, device = asked.work, asked.device
    standing = steady(share, work, device, extra_iterations=6 * (work.iterations + 2))
    whole = Ablation(WHOLE, WHOLE, work.context, _spread(loop(standing, work.iterations).ends, device), 1.0)
    whole = replace(whole, whole_us=whole.spread.median_us)

    def without(decision: str, variant: str, in_flight: int) -> Ablation:
        spread = _spread(loop(standing, work.iterations, in_flight).ends, device)
        return Ablation(decision, variant, work.context, spread, whole.spread.median_us)

    found: list[Ablation] = []
    if "overlap" in asked.decisions:
        found.append(without("overlap", "settled before the next is launched", 0))
    if "one graph" in asked.decisions and device.type == "cuda":
        if work.num_drafts:
            with split(standing, "nothing"):
                found.append(without("one graph", "three graphs", 1))
            with split(standing, "host"):
                found.append(without("one graph", "three graphs, the host between them", 0))
        with without_graphs(standing):
            found.append(without("one graph", "kernel by kernel", 1))
    return whole, found


def _index_share(share: Share, work: Work, device: torch.device) -> Iterator[Ablation]:
    """Draft steps that reuse the selection, and draft steps that each make their own."""
    whole_us: float | None = None
    for variant in (WHOLE, "each draft step selects for itself"):
        standing = steady(share, work, device)
        if variant != WHOLE:
            _select_in_every_step(standing)
        spread = _spread(loop(standing, work.iterations).ends, device)
        whole_us = spread.median_us if whole_us is None else whole_us
        step_us = _draft_step_us(standing) if device.type == "cuda" else None
        yield Ablation("IndexShare", variant, work.context, spread, whole_us, step_us)
        del standing


@dataclass(frozen=True, slots=True)
class _EveryStepSelects(Mtp):
    """A draft layer that runs its indexer in the chain too."""

    def forward(
        self, next_ids: Tensor, hidden: Tensor, step: Step, cache: LayerCache, selection: Selection | None
    ) -> tuple[Tensor, Selection]:
        del selection
        return Mtp.forward(self, next_ids, hidden, step, cache, None)


@torch.inference_mode()
def _select_in_every_step(standing: Steady) -> None:
    runner = standing.runner
    mtp = runner.iteration.mtp
    assert mtp is not None
    own = _EveryStepSelects(**{field.name: getattr(mtp, field.name) for field in fields(mtp)})
    runner.iteration = replace(runner.iteration, mtp=own)
    if runner.decoder is not None:
        had = bool(runner.decoder.graphs.costs)
        runner.decoder = Decoder(runner.iteration, runner.rows, runner.settings)
        if had:
            runner.decoder.capture(runner.decoder.key(runner.decoder.buckets[-1], "greedy"))


def _draft_step_us(standing: Steady) -> float:
    """Of one step of the chain: its graph replayed alone, by the number of its steps."""
    steps = standing.runner.settings.num_drafts - 1
    with split(standing, "nothing") as graphs:
        loop(standing, 1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graphs.chain.replay()
        end.record()
        torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / REPLAYS / steps


def _other_ops(share: Share, asked: Asked, whole_us: float) -> Iterator[Ablation]:
    """Ops bound to other implementations, one decision at a time; the engine's own are bound again at the end."""
    work, device = asked.work, asked.device
    made_for_a_gpu = tuple(TESTED_TARGETS)
    try:
        for decision, variants in OTHER_OPS.items():
            if decision not in asked.decisions:
                continue
            for variant, overrides in variants:
                if device.type == "cpu" and any(target.startswith(made_for_a_gpu) for target in overrides.values()):
                    continue
                with contextlib.suppress(BindError):  # nothing else is there on this machine
                    bind(asked.targets, {**work.ops, **overrides})
                    ends = loop(
                        steady(replace(share, weights=_unpacked(share.weights)), work, device), work.iterations
                    ).ends
                    yield Ablation(decision, variant, work.context, _spread(ends, device), whole_us)
    finally:
        bind(asked.targets, dict(work.ops))


def _unpacked(weights: T) -> T:
    """The same weights without the packed forms that they have made for the ops bound until now."""
    if isinstance(weights, tuple):
        return cast("T", tuple(_unpacked(one) for one in cast("tuple[object, ...]", weights)))
    if not is_dataclass(weights) or isinstance(weights, type):
        return weights
    return cast(
        "T", replace(weights, **{field.name: _unpacked(getattr(weights, field.name)) for field in fields(weights)})
    )


def _spread(ends: Sequence[float], device: torch.device) -> Spread:
    return Spread.of(ends, "graph" if device.type == "cuda" else "cpu")
