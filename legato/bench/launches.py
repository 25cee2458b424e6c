"""The launches of one decode iteration on one rank, each with the weight that it must read: arithmetic, no GPU.

Owns what a launch reads, from the model's shape. Knows no kernel and no tensor. Called by `legato.bench.skeleton`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from legato.model.spec import ModelSpec

#: Bits of one stored weight, scales included.
NVFP4_BITS, BF16_BITS = 4.5, 16.0

GLM_5_2: dict[str, object] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000},
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1048576,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "num_nextn_predict_layers": 1,
}
"""The published shape of GLM-5.2 (its `config.json`), for predictions without a checkpoint."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `outputs` x `inputs` weights of `bits` each, times `rows` rows. Launches that read activations
    only (attention, scores, top-k) have no outputs."""

    name: str
    rows: int
    outputs: int = 0
    inputs: int = 0
    bits: float = BF16_BITS

    @property
    def weight_bytes(self) -> int:
        return round(self.outputs * self.inputs * self.bits / 8)


@dataclass(frozen=True)
class Rank:
    """One of `num_ranks` ranks: heads, experts' width, dense width and vocabulary divided, the rest whole."""

    spec: ModelSpec
    num_ranks: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "expert_intermediate", "dense_intermediate", "vocab_size"):
            width = getattr(self.spec, name)
            if width % self.num_ranks:
                raise ValueError(f"{name} = {width} does not divide into {self.num_ranks} ranks")

    def share(self, width: int) -> int:
        return width // self.num_ranks


def distinct_experts(spec: ModelSpec, rows: int) -> float:
    """Experts that at least one of `rows` rows chooses, on average, if all are equally likely: E (1 - (1 - A/E)^T)."""
    return spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** rows)


def iteration(rank: Rank, num_drafts: int, expert_bits: float = NVFP4_BITS) -> tuple[Launch, ...]:
    """Verify (K + 1 rows), draft-extend (the same rows) and K - 1 single-row steps of the MTP layer, launch by launch as the
    engine makes them on Hopper.

    `expert_bits`: of the routed experts' weights in the decoder layers; the MTP layer is kept in bfloat16, as published.
    Collectives are not launches here. Without drafts the MTP layer does not run. The few launches between verification and drafts
    (acceptance, positions) are left out.
    """
    spec, rows = rank.spec, num_drafts + 1
    launches = [Launch("norm", rows)]
    for layer in range(spec.num_layers):
        launches += _layer(rank, rows, layer, expert_bits)
    launches += _head(rank, rows)
    if num_drafts and spec.has_mtp:
        launches += _draft(rank, rows, spec.num_layers)
        for _ in range(num_drafts - 1):
            launches += _draft(rank, 1, None)
    return tuple(launches)


def _draft(rank: Rank, rows: int, indexer_layer: int | None) -> Iterator[Launch]:
    """One step of the MTP layer. Chain steps (`None`) reuse the selection; all need the head's weights."""
    hidden = rank.spec.hidden_size
    yield Launch("mtp_inputs", rows)
    yield Launch("eh_proj", rows, hidden, 2 * hidden)
    yield Launch("norm", rows)
    yield from _attention(rank, rows, indexer_layer is not None)
    yield from _moe(rank, rows, BF16_BITS)
    yield Launch("add_norm", rows)
    yield from _head(rank, 1)


def _head(rank: Rank, rows: int) -> Iterator[Launch]:
    yield Launch("lm_head", rows, rank.share(rank.spec.vocab_size), rank.spec.hidden_size)
    yield Launch("choose", rows)


def _layer(rank: Rank, rows: int, layer: int, expert_bits: float) -> Iterator[Launch]:
    yield from _attention(rank, rows, rank.spec.is_full(layer))
    if rank.spec.is_dense(layer):
        hidden, share = rank.spec.hidden_size, rank.share(rank.spec.dense_intermediate)
        yield Launch("dense_gate_up", rows, 2 * share, hidden)
        yield Launch("dense_down", rows, hidden, share)
    else:
        yield from _moe(rank, rows, expert_bits)
    yield Launch("add_norm", rows)


def _attention(rank: Rank, rows: int, has_indexer: bool) -> Iterator[Launch]:
    """The indexer's key and gate projections ride in the first product, its queries in the second; W_UK in what comes between
    them and the selection."""
    spec, heads = rank.spec, rank.share(rank.spec.num_heads)
    first = spec.q_lora_rank + spec.latent_dim + (spec.index_dim + spec.index_heads if has_indexer else 0)
    yield Launch("qkv_a", rows, first, spec.hidden_size)
    second = heads * spec.qk_dim + (spec.index_heads * spec.index_dim if has_indexer else 0)
    yield Launch("q_b", rows, second, spec.q_lora_rank)
    yield Launch("prologue", rows, heads * spec.kv_lora_rank, spec.nope_dim)
    if has_indexer:
        yield Launch("index_scores", rows)
        yield Launch("top_k", rows)
    yield Launch("attend", rows)
    yield Launch("absorb_v", rows, heads * spec.v_dim, spec.kv_lora_rank)
    yield Launch("o_proj", rows, spec.hidden_size, heads * spec.v_dim)
    yield Launch("add_norm", rows)


def _moe(rank: Rank, rows: int, expert_bits: float) -> Iterator[Launch]:
    """The router, and all experts in one launch: routed ones in their own bits, counted as so many outputs of bfloat16, and the
    shared one."""
    spec, hidden = rank.spec, rank.spec.hidden_size
    routed = distinct_experts(spec, rows) * expert_bits / BF16_BITS
    yield Launch("router", rows, spec.num_experts, hidden)
    outputs = round(3 * rank.share(spec.expert_intermediate) * (routed + spec.num_shared_experts))
    yield Launch("experts", rows, outputs, hidden)
