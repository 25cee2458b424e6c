"""The weights of a GLM-5 model, and loading them from a checkpoint.

Owns the dataclasses the model reads and the order of loading. Must not know files (`checkpoint`), names (`names`) or
formats (`quant`) beyond calling them. Called once per rank at start-up. Shape letters: docs/shapes.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from legato.model.checkpoint import Checkpoint, Progress, no_progress
from legato.model.inventory import Inventory, survey
from legato.model.lean import (
    DraftHead,
    DraftWeights,
    InputProjection,
    LeanSource,
    Saving,
    draft_head,
    input_projection,
)
from legato.model.names import layer_prefix
from legato.model.reader import Placement, Reader, Residency, WeightSource
from legato.model.requantization import AS_STORED, Finish, Requantization, finish_of, unchanged
from legato.model.shards import regions, vocabulary_rows
from legato.model.spec import ModelSpec
from legato.ops import linear_heads, prologue_full, prologue_shared, route
from legato.parallel.mesh import ONE_RANK, Mesh
from legato.quant.formats import split_multiple
from legato.quant.join import concatenate
from legato.quant.packed import keep
from legato.quant.weight import Experts, Weight

__all__ = [
    "AttentionWeights",
    "GlmWeights",
    "IndexerWeights",
    "LayerWeights",
    "MlpWeights",
    "MoeWeights",
    "MtpWeights",
    "Residency",
    "assemble",
    "load_weights",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexerWeights:
    """k_norm_weight [X], k_norm_bias [X]; the indexer's matrices are rows of the attention's `qkv` and `q`."""

    k_norm_weight: torch.Tensor
    k_norm_bias: torch.Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """qkv [Q+C+R(+X+I), D]: rows of q_a, kv_a and, with an indexer, wk and weights_proj; q_norm [Q]; q [H*(N+R)(+I*X), Q]:
    rows of q_b and, with an indexer, wq_b; kv_norm [C], kv_b [H, N+V, C], o [D, H*V]; nope_dim is N. The indexer is None
    on layers that reuse an earlier selection. H counts the heads of this rank."""

    qkv: Weight
    q_norm: torch.Tensor
    q: Weight
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    nope_dim: int
    o: Weight
    indexer: IndexerWeights | None

    @property
    def w_uk(self) -> torch.Tensor:
        """[H, N, C]: a head's keys, without their rope part, out of a latent."""
        return self.kv_b[:, : self.nope_dim]

    @property
    def w_uv(self) -> torch.Tensor:
        """[H, V, C]: a head's values out of a latent."""
        return self.kv_b[:, self.nope_dim :]

    @cached_property
    def absorb(self) -> Any:
        """w_uk as the bound prologue wants it."""
        return (prologue_shared if self.indexer is None else prologue_full).pack(self.w_uk)

    @cached_property
    def expand(self) -> Any:
        """w_uv as the bound `linear_heads` wants it."""
        return linear_heads.pack(self.w_uv)


@dataclass(frozen=True)
class MlpWeights:
    """gate_up [2F, D] (gate rows, then up rows), down [D, F]."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class MoeWeights:
    """gate [E, D] float32, bias [E] float32 (chooses, never weighs), the routed experts, the shared expert where there is
    one that the routed ones do not hold."""

    gate: torch.Tensor
    bias: torch.Tensor
    experts: Experts
    shared: MlpWeights | None

    @cached_property
    def router(self) -> Any:
        """gate as the bound `route` wants it."""
        return route.pack(self.gate)


@dataclass(frozen=True)
class LayerWeights:
    """input_norm [D], attention, post_norm [D], mlp."""

    input_norm: torch.Tensor
    attention: AttentionWeights
    post_norm: torch.Tensor
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """enorm [D] (on the embedding), hnorm [D] (on the hidden), eh_proj over [embedding ; hidden], the layer, the same layer
    without its indexer (`seeded`: for steps that are given a selection), norm [D]."""

    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: InputProjection
    layer: LayerWeights
    seeded: LayerWeights
    norm: torch.Tensor


@dataclass(frozen=True)
class GlmWeights:
    """embed [W, D], the decoder layers, norm [D], lm_head [W, D], the MTP layer where it is wanted and present, and the drafts'
    own head where they do not use lm_head."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Weight
    mtp: MtpWeights | None
    draft_head: DraftHead | None = None


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    resident: Residency,
    progress: Progress = no_progress,
    mesh: Mesh = ONE_RANK,
    again: Requantization = AS_STORED,
    inventory: Inventory | None = None,
) -> GlmWeights:
    """Loads every weight that `spec` asks for, or nothing; of tensors that are split over ranks, this rank's part alone.

    Names, shapes and dtypes of the whole checkpoint are checked before the first byte is read; scales are checked as
    they are read. Norms and dense weights come in `dtype`; router and its bias in float32; experts
    that mix formats are dequantised. `again`: what is quantised although the checkpoint has it in more bits. With
    `spec.has_mtp` false the MTP layer is neither read nor fetched; `mtp` is None also where the checkpoint has none.
    Sharded: H, F and the head's W are a rank's share (decision 9 says how each divides). `inventory`: of this checkpoint
    and spec, where it has been made already (1.5 s for the 176,000 tensors of GLM-5.2 in NVFP4).
    What the survey warns of is logged. Raises `CheckpointError`, and `SpecError` for widths that the ranks do not divide.
    """
    inventory = inventory or survey(checkpoint, spec)
    inventory.require()
    for warning in inventory.warnings:
        logger.warning(warning)
    borders = regions(inventory, spec, mesh)
    reader = Reader(checkpoint, inventory, borders, Placement(torch.device(device), dtype, resident), progress)
    multiple = split_multiple(inventory.linears["lm_head"].format, 0)
    formats = {name: stored.format for name, stored in inventory.linears.items()}
    finish = finish_of(again.dense, formats, dtype if resident is Residency.DENSE else None)
    spec = replace(spec, has_mtp=inventory.has_mtp)
    return assemble(spec, reader, vocabulary_rows(spec, multiple, mesh), mesh, again.drafts, finish)


def assemble(
    spec: ModelSpec,
    source: WeightSource,
    head_rows: int,
    mesh: Mesh = ONE_RANK,
    drafts: DraftWeights = DraftWeights.STORED,
    finish: Finish = unchanged,
) -> GlmWeights:
    """Every weight that `spec` asks for, in the order in which a checkpoint has them; `head_rows` on this rank. `finish`: what
    becomes of the weights of attention, dense layers and shared experts."""
    if Saving.EXPERTS in drafts.savings and spec.has_mtp:
        source = LeanSource(source, spec)
    loader = _Loader(spec, source, finish)
    embed = source.float_tensor("model.embed_tokens.weight")
    layers = tuple(loader.layer(layer) for layer in range(spec.num_layers))
    mtp = loader.mtp(embed, drafts, mesh) if spec.has_mtp else None
    norm = source.float_tensor("model.norm.weight")
    head = source.head("lm_head", head_rows)
    return GlmWeights(embed, layers, norm, head, mtp, draft_head(source, head, spec, drafts, mesh) if mtp else None)


@dataclass(frozen=True, slots=True)
class _Projections:
    """Attention's matrices by name, over the hidden state (q_a, kv_a, perhaps wk and weights_proj) and over the query latent
    (q_b, perhaps wq_b), in the order in which they are joined."""

    inputs: dict[str, Weight]
    queries: dict[str, Weight]

    def without_indexer(self) -> _Projections:
        return _Projections(dict(list(self.inputs.items())[:2]), dict(list(self.queries.items())[:1]))


class _Loader:
    """Assembles layers from the reader's weights: the order of the table in `legato.model.names`."""

    def __init__(self, spec: ModelSpec, reader: WeightSource, finish: Finish) -> None:
        self.spec, self.reader, self._finish = spec, reader, finish

    def layer(self, layer: int) -> LayerWeights:
        return self._layer(layer, self._projections(layer_prefix(layer) + "self_attn.", layer))

    def _layer(self, layer: int, projections: _Projections) -> LayerWeights:
        prefix, reader = layer_prefix(layer), self.reader
        return LayerWeights(
            input_norm=reader.float_tensor(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn.", projections),
            post_norm=reader.float_tensor(prefix + "post_attention_layernorm.weight"),
            mlp=self._dense(prefix + "mlp.") if self._is_dense(layer) else self._moe(prefix + "mlp."),
        )

    def mtp(self, embed: torch.Tensor, drafts: DraftWeights, mesh: Mesh) -> MtpWeights:
        prefix, reader = layer_prefix(self.spec.num_layers), self.reader
        projections = self._projections(prefix + "self_attn.", self.spec.num_layers)
        layer = self._layer(self.spec.num_layers, projections)
        without = projections.without_indexer()
        seeded = replace(
            layer.attention, qkv=self._joined(without.inputs), q=self._joined(without.queries), indexer=None
        )  # fmt: skip
        enorm, hnorm = (reader.float_tensor(f"{prefix}{name}.weight") for name in ("enorm", "hnorm"))
        projection = reader.linear(prefix + "eh_proj")
        return MtpWeights(
            enorm=enorm,
            hnorm=hnorm,
            eh_proj=input_projection(projection, embed, enorm, self.spec.rms_eps, drafts, mesh),
            layer=layer,
            seeded=replace(layer, attention=seeded),
            norm=reader.float_tensor(prefix + "shared_head.norm.weight"),
        )

    def _is_dense(self, layer: int) -> bool:
        return layer < self.spec.num_layers and self.spec.is_dense(layer)

    def _projections(self, prefix: str, layer: int) -> _Projections:
        inputs, queries = ["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"]
        if self.spec.is_full(layer):
            inputs += ["indexer.wk", "indexer.weights_proj"]
            queries += ["indexer.wq_b"]
        return _Projections(self._named(prefix, inputs), self._named(prefix, queries))

    def _named(self, prefix: str, modules: list[str]) -> dict[str, Weight]:
        return {prefix + module: self.reader.linear(prefix + module) for module in modules}

    def _joined(self, parts: dict[str, Weight]) -> Weight:
        return self._finish(list(parts), concatenate(list(parts.values())))

    def _attention(self, prefix: str, projections: _Projections) -> AttentionWeights:
        spec, reader = self.spec, self.reader
        kv_b = reader.dense(prefix + "kv_b_proj", reader.dtype)
        return AttentionWeights(
            qkv=self._joined(projections.inputs),
            q_norm=reader.float_tensor(prefix + "q_a_layernorm.weight"),
            q=self._joined(projections.queries),
            kv_norm=reader.float_tensor(prefix + "kv_a_layernorm.weight"),
            kv_b=kv_b.view(-1, spec.nope_dim + spec.v_dim, spec.kv_lora_rank),
            nope_dim=spec.nope_dim,
            o=self._joined(self._named(prefix, ["o_proj"])),
            indexer=self._indexer(prefix + "indexer.") if len(projections.queries) > 1 else None,
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        reader = self.reader
        return IndexerWeights(
            k_norm_weight=reader.float_tensor(prefix + "k_norm.weight"),
            k_norm_bias=reader.float_tensor(prefix + "k_norm.bias"),
        )

    def _dense(self, prefix: str) -> MlpWeights:
        gate_and_up = [prefix + "gate_proj", prefix + "up_proj"]
        gate_up = self._finish(gate_and_up, self.reader.joined(gate_and_up))
        return MlpWeights(gate_up, self._finish([prefix + "down_proj"], self.reader.linear(prefix + "down_proj")))

    def _moe(self, prefix: str) -> MoeWeights:
        reader = self.reader
        gate = reader.dense(prefix + "gate", torch.float32)
        bias = reader.float_tensor(prefix + "gate.e_score_correction_bias", torch.float32)
        experts = reader.experts(prefix + "experts.", self.spec.num_experts)
        shared = self._dense(prefix + "shared_experts.") if self.spec.num_shared_experts else None
        experts, inside = keep(experts, None if shared is None else (shared.gate_up, shared.down))
        return MoeWeights(
            gate=gate,
            bias=bias,
            experts=experts,
            shared=None if inside else shared,
        )
