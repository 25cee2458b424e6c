"""Multi-head latent attention over a selection of cached tokens, and the DSA indexer that makes the selection.

Reads like the formulas: absorbed MLA (queries move into the latent space, one cached head of width C + R serves all heads).
Knows nothing of batching or pages beyond passing slots on. Called by `model.layer`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.config import PAGE_SIZE, score_rows
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import AttentionWeights, IndexerWeights
from legato.ops import (
    index_scores,
    layer_norm,
    linear_bf16,
    linear_heads,
    quantize_index_query,
    rms_norm,
    rope_half,
    rope_interleaved,
    sparse_mla,
    store_index_keys,
    store_latent,
    top_k,
)

INDEX_NORM_EPS = 1e-6
"""Of the index key's LayerNorm; a constant of the architecture, not of the config."""


def attention(
    x: Tensor, weights: AttentionWeights, cache: LayerCache, step: Step, selection: Selection | None, spec: ModelSpec
) -> tuple[Tensor, Selection]:
    """One attention block on normed hidden states.

    Args:
        x: [T, D] output of `input_layernorm`.
        weights: of this layer.
        cache: of this layer; the rows' latents (and index keys) are stored before anything is read.
        step: where the rows stand.
        selection: what the rows attend to; `None` lets this layer's indexer choose.
        spec: the model's shapes.

    Returns:
        [T, D] output of `o_proj`, and the selection that was used.

    Raises:
        ValueError: no selection was passed and the layer has no indexer.
    """
    num_rows, rank, latent_dim = x.shape[0], spec.q_lora_rank, spec.kv_lora_rank
    num_heads = weights.w_uk.shape[0]  # of this rank
    qkv = weights.qkv_a.linear(x)
    q_lora = rms_norm(qkv[:, :rank], weights.q_a_norm, spec.latent_eps)
    latent = rms_norm(qkv[:, rank : rank + latent_dim], weights.kv_a_norm, spec.latent_eps)
    rope_key = rope_interleaved(qkv[:, None, rank + latent_dim :], step.cos, step.sin, 0)[:, 0]
    store_latent(cache.latent, latent, rope_key, step.slots)

    if selection is None:
        if weights.indexer is None or cache.index is None:
            raise ValueError("a layer without an indexer was given no selection to reuse")
        selection = select(x, q_lora, weights.indexer, cache.index, step, spec)

    q = weights.q_b.linear(q_lora).view(num_rows, num_heads, spec.nope_dim + spec.rope_dim)
    q = rope_interleaved(q, step.cos, step.sin, spec.nope_dim)
    q_latent = linear_heads(q[..., : spec.nope_dim], weights.w_uk.transpose(1, 2))
    q = torch.cat((q_latent, q[..., spec.nope_dim :]), dim=-1)
    o_latent = sparse_mla(q, cache.latent, selection.slots, selection.counts, spec.attention_scale, latent_dim)
    o = linear_heads(o_latent, weights.w_uv)
    return weights.o.linear(o.reshape(num_rows, num_heads * spec.v_dim)), selection


def select(
    x: Tensor, q_lora: Tensor, weights: IndexerWeights, index_cache: Tensor, step: Step, spec: ModelSpec
) -> Selection:
    """The indexer: stores the rows' index keys, scores every visible key and keeps the `index_topk` best.

    A few rows at a time, so that the scores keep to `step.score_bytes` however long the context is; no bit depends on how many.

    score(n, j) = sum_h gate_h(n) * relu(q_h(n) . k(j)), with gate = weights_proj(x) * I^-1/2 * X^-1/2. Positional rotation is on
    the *first* R dims (the main heads have it last). No Hadamard transform: it would cancel in the product.

    Args:
        x: [T, D] normed hidden states; keys and gates come from them.
        q_lora: [T, Q] normed query latent; the index queries come from it.
        weights: of this layer's indexer.
        index_cache: paged index keys; a byte cache holds e4m3 keys, and then queries are quantised likewise.
        step: where the rows stand.
        spec: the model's shapes.
    """
    rope = rope_interleaved if spec.index_rope_interleaved else rope_half
    key = layer_norm(weights.wk.linear(x), weights.k_norm_weight, weights.k_norm_bias, INDEX_NORM_EPS)
    key = rope(key[:, None], step.cos, step.sin, 0)[:, 0]
    store_index_keys(index_cache, key, step.slots)

    q = weights.wq_b.linear(q_lora).view(x.shape[0], spec.index_heads, spec.index_dim)
    q = rope(q, step.cos, step.sin, 0)
    gates = linear_bf16(x, weights.weights_proj).float() * (spec.index_heads**-0.5 * spec.index_dim**-0.5)
    if index_cache.dtype == torch.uint8:
        q, gates = quantize_index_query(q, gates)
    num_rows, width = x.shape[0], step.page_table.shape[1] * PAGE_SIZE
    height = score_rows(step.score_bytes, width)
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, num_rows, height):
        tile = slice(first, min(first + height, num_rows))
        table, request, lengths = step.page_table, step.request[tile], step.lengths[tile]
        scores = index_scores(q[tile], gates[tile], index_cache, table, request, lengths)
        parts.append(top_k(scores, lengths, spec.index_topk, table, request))
    if len(parts) == 1:
        return Selection(*parts[0])
    slots, counts = zip(*parts, strict=True)
    return Selection(torch.cat(slots), torch.cat(counts))
