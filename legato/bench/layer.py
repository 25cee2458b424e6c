"""One kind of decoder layer of a rank's share: hidden states to hidden states, many layers of it as one graph.

Owns the chain, its figure and the order of the kernels in a layer. What runs is the engine's own layer on requests in the middle
of their answers (`legato.bench.steady`); exchanges loop back. Called by `legato bench layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from legato.bench.record import against_floor
from legato.bench.share import Share
from legato.bench.steady import SliceError, Work, steady
from legato.bench.timing import Spread, count_launches, time_calls
from legato.bench.trace import Span, Trace
from legato.model.layer import decoder_layer
from legato.model.spec import IndexerKind, ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import LayerWeights, MoeWeights
from legato.ops import route
from legato.quant.packed import PackedExperts
from legato.runtime.batch import build_batch

FEWEST_LAYERS = 16
"""In one graph: its own start counts little among so many."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A kernel's place in a layer: microseconds from the end of the layer before to its start (negative: it starts early and
    waits) and to its end, the mean over the layers of a recording."""

    name: str
    start_us: float
    stop_us: float


@dataclass(frozen=True, slots=True)
class LayerFigure:
    """What was measured of one layer.

    Attributes:
        kind: whether the layer runs its own indexer.
        spread: of a layer in the chain.
        num_layers: of the chain; `distinct` of them have weights of their own and are used in turn.
        kernels: of a layer; None where nothing counts them.
        experts_reached: by the rows, on average.
        num_bytes: that a layer must read.
        moments: its kernels in order; empty on a CPU.
    """

    kind: IndexerKind
    spread: Spread
    num_layers: int
    distinct: int
    kernels: float | None
    experts_reached: float
    num_bytes: int
    moments: tuple[Moment, ...]


@torch.inference_mode()
def measure(share: Share, work: Work, kind: IndexerKind, device: torch.device) -> LayerFigure:
    """Times sparse layers of one kind, for the rows that verify the drafts of `work`.

    Raises:
        SliceError: the share has no sparse layer of this kind, or hidden states are not finite.
    """
    spec, layers = share.spec, share.weights.layers
    chosen = [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer.mlp, MoeWeights) and spec.indexer_kinds[index] == kind
    ]
    full = next((index for index in range(len(layers)) if spec.is_full(index)), None)
    if not chosen or full is None:
        raise SliceError(f"the first {len(layers)} layers have no sparse one of kind {kind!r}: take more")
    standing = steady(share, work, device, graphs="off")
    runner = standing.runner
    batch = build_batch(standing.plan, runner.rows, spec).within(runner.settings.score_bytes)
    step = batch.step
    rows = _Rows(share, step, runner.iteration.caches)
    generator = torch.Generator(device).manual_seed(0)
    shape = (step.positions.shape[0], layers[0].input_norm.shape[0])
    h = torch.randn(*shape, generator=generator, device=device).to(share.weights.embed.dtype)
    _, _, seed = rows.layer(full, h, h, None, layers[full].input_norm)
    in_turn = [chosen[number % len(chosen)] for number in range(max(FEWEST_LAYERS, len(chosen)))]
    selection = seed if kind == "shared" else None

    def chain() -> Tensor:
        return rows.chain(in_turn, h, selection)

    spread, results = time_calls([chain], device)
    made = results[-1]
    if not isinstance(made, Tensor) or not bool(made.isfinite().all()):
        raise SliceError("hidden states are not finite: selection and routing were not those of numbers")
    reached = fmean(_reached(layers[index], h, spec) for index in chosen)
    on_gpu = device.type == "cuda"
    launches = count_launches(chain) if on_gpu else None
    count = len(in_turn)
    latents = min(work.context, spec.index_topk) * share.traffic.latent_row // spec.num_layers
    keys = work.context * share.traffic.index_row // max(spec.num_full, 1) if kind == "full" else 0
    return LayerFigure(
        kind=kind,
        spread=Spread(spread.median_us / count, spread.p20_us / count, spread.p80_us / count, spread.method),
        num_layers=count,
        distinct=len(chosen),
        kernels=None if launches is None else launches / count,
        experts_reached=reached,
        num_bytes=round(_weight_bytes(layers[chosen[0]], reached)) + work.batch * (latents + keys),
        moments=_moments(chain, count) if on_gpu else (),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that run through layers of a share."""

    share: Share
    step: Step
    caches: Sequence[LayerCache]

    def layer(
        self, index: int, h: Tensor, normed: Tensor, selection: Selection | None, next_norm: Tensor
    ) -> tuple[Tensor, Tensor, Selection]:
        share = self.share
        weights, cache = share.weights.layers[index], self.caches[index]
        return decoder_layer(h, normed, weights, cache, self.step, selection, next_norm, share.spec, share.communicator)

    def chain(self, indices: Sequence[int], h: Tensor, selection: Selection | None) -> Tensor:
        """The hidden states behind these layers, one after the other."""
        layers, normed = self.share.weights.layers, h
        for index, following in zip(indices, [*indices[1:], indices[0]], strict=True):
            h, normed, _ = self.layer(index, h, normed, selection, layers[following].input_norm)
        return h


def fields(share: Share, work: Work, figure: LayerFigure, gpu: str | None, case: Mapping[str, Any]) -> dict[str, Any]:
    """As one line of a record, without the setting."""
    return {
        "bench": "layer",
        "name": share.spec.name,
        "implementation": figure.spread.method,
        "case": {"tp": share.communicator.mesh.size, "kind": figure.kind, **case},
        **work.fields,
        "experts_reached": figure.experts_reached,
        **figure.spread.fields,
        "kernels": figure.kernels,
        "layers_in_chain": figure.num_layers,
        "layers_distinct": figure.distinct,
        **against_floor(figure.spread.median_us, figure.num_bytes, gpu),
        "moments": [[moment.name, round(moment.start_us, 2), round(moment.stop_us, 2)] for moment in figure.moments],
        "context_synthetic": True,
        "correct": None,  # drawn weights: what a layer gives is the tests' business
    }


def _reached(layer: LayerWeights, x: Tensor, spec: ModelSpec) -> int:
    """Experts that these rows choose."""
    moe = layer.mlp
    assert isinstance(moe, MoeWeights), "sparse layers have experts"
    ids, _ = route(x, moe.router, moe.bias, spec.experts_per_token, spec.routed_scale)
    return int(ids.unique().numel())


def _weight_bytes(layer: LayerWeights, reached: float) -> float:
    """Bytes of weights of a sparse layer whose rows reach so many experts."""
    attention, moe = layer.attention, layer.mlp
    assert isinstance(moe, MoeWeights), "sparse layers have experts"
    parts = (attention.qkv, attention.q, attention.o, attention.kv_b, moe.router)
    always = sum(part.nbytes for part in parts)
    experts = moe.experts.nbytes
    if moe.shared is not None:
        always += moe.shared.gate_up.nbytes + moe.shared.down.nbytes
    elif isinstance(moe.experts, PackedExperts):
        inside = moe.experts.shared_nbytes
        always, experts = always + inside, experts - inside
    return always + experts * reached / moe.experts.num_experts


def _moments(chain: Callable[[], object], num_layers: int) -> tuple[Moment, ...]:
    """The kernels of a layer in order, from a recording of one replay. Raises SliceError where layers launch different ones."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recording:
        graph.replay()
        torch.cuda.synchronize()
    recorded = recording.profiler
    assert recorded is not None and recorded.kineto_results is not None, "a recording that has ended has results"
    return moments(Trace.of(recorded.kineto_results.events()).device, num_layers)


def moments(spans: Sequence[Span], num_layers: int) -> tuple[Moment, ...]:
    """The median layer of a recording whose spans stand in the order of their starts: nanoseconds become microseconds.

    Raises:
        SliceError: the spans do not divide into layers of the same kernels.
    """
    width, rest = divmod(len(spans), num_layers)
    layers = [spans[number * width : (number + 1) * width] for number in range(num_layers)]
    names = [span.name for span in layers[0]]
    if rest or any([span.name for span in layer] != names for layer in layers):
        raise SliceError(f"{len(spans)} kernels are not {num_layers} layers of the same ones")
    ends = [max(span.stop for span in layer) for layer in layers]
    return tuple(
        Moment(
            name,
            median((layer[place].start - end) / 1e3 for layer, end in zip(layers[1:], ends, strict=False)),
            median((layer[place].stop - end) / 1e3 for layer, end in zip(layers[1:], ends, strict=False)),
        )
        for place, name in enumerate(names)
    )
