"""Multi-head latent attention over a selection of cached tokens, and the DSA indexer that makes the selection.

Reads like the formulas: absorbed MLA (queries move into the latent space, one cached head of width C + R serves all heads), and,
where a prompt's rows share tokens, the same with keys and values of each head.
Knows nothing of batching or pages beyond passing slots on. Called by `model.layer`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from legato.config import PAGE_SIZE, score_rows
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Prompt, Selection, Step, Together
from legato.model.weights import AttentionWeights
from legato.ops import (
    index_scores,
    linear_bf16,
    linear_heads,
    mark_selected,
    masked_mha,
    prologue_full,
    prologue_shared,
    sparse_mla,
    top_k,
)
from legato.ops.attend.masked import UNIT, WIDTHS, place_lengths, sharing_pays
from legato.ops.cache import read_latent_rows
from legato.ops.prologue import IndexNorm, LatentNorm, Places

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
    indexer = weights.indexer
    qkv = weights.qkv.linear(x)
    share = _share_tokens(step, weights.kv_b.shape[0], spec) if selection is None else selection.together is not None
    if selection is None:
        plan(step, spec.index_topk)
    q = weights.q.linear_normed(qkv[:, : spec.q_lora_rank], weights.q_norm, spec.latent_eps)
    norm, places = LatentNorm(weights.kv_norm, spec.latent_eps), Places(step.cos, step.sin, step.slots)
    if selection is not None:
        if indexer is not None:
            raise ValueError("a layer with an indexer was given a selection to reuse")
        q = prologue_shared(qkv, q, weights.absorb, norm, places, cache.latent, share)
        # A product starts nothing before what it reads is complete: all older than `q`'s product is, once the prologue begins.
        stored = step.slots
    else:
        if indexer is None or cache.index is None:
            raise ValueError("a layer without an indexer was given no selection to reuse")
        index_norm = IndexNorm(indexer.k_norm_weight, indexer.k_norm_bias, INDEX_NORM_EPS, spec.index_rotation)
        q, index_q, gates = prologue_full(
            qkv, q, weights.absorb, norm, index_norm, places, cache.latent, cache.index, share
        )  # fmt: skip
        selection = select(index_q, gates, cache.index, step, spec.index_topk)
        if share and step.prompt is not None:
            selection = together(selection, step.prompt, step.lengths, cache.latent.shape[0])
        stored = None
    if selection.together is not None:
        o = attend_together(q, cache.latent, selection.together, weights.kv_b, spec.attention_scale)
    else:
        scale, latent_dim = spec.attention_scale, spec.kv_lora_rank
        o = sparse_mla(q, cache.latent, selection.slots, selection.counts, scale, latent_dim, stored)
        o = linear_heads(o, weights.expand)
    return weights.o.linear(o.flatten(1)), selection


def _share_tokens(step: Step, heads: int, spec: ModelSpec) -> bool:
    """Whether the rows are of one request, have the kernel's widths, and are done sooner if they share its tokens."""
    widths = spec.nope_dim, spec.rope_dim, spec.v_dim
    if step.prompt is None or widths != WIDTHS:
        return False
    return sharing_pays(step.request.shape[0], step.prompt.tokens.shape[0], heads)


def together(selection: Selection, prompt: Prompt, lengths: Tensor, num_pages: int) -> Selection:
    """The selection, as masks over the prompt's tokens too. lengths [T]: what each row sees, ascending."""
    tokens, pages = prompt.tokens, prompt.pages
    places = torch.full((num_pages,), -1, dtype=torch.int32, device=pages.device)
    places.scatter_(0, pages, torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device))
    masks = mark_selected(selection.slots, selection.counts, places, -(-tokens.shape[0] // UNIT))
    return replace(selection, together=Together(tokens.long(), place_lengths(lengths), masks))


def attend_together(q: Tensor, latents: Tensor, rows: Together, kv_b: Tensor, scale: float) -> Tensor:
    """[T, H, V] of whole queries [T, H, N+R]: every token's keys and values are made of its latent, once for all rows."""
    tokens, latent_dim = read_latent_rows(latents, rows.tokens, q.dtype), kv_b.shape[2]
    kv = linear_bf16(tokens[:, :latent_dim], kv_b.flatten(0, 1)).unflatten(1, kv_b.shape[:2])
    return masked_mha(q, kv, tokens[:, latent_dim:], rows.lengths, rows.masks, scale)


def plan(step: Step, index_topk: int) -> None:
    """Makes the plans of a step's rows, unless there are some. Behind a product, whose time hides it: since a product starts
    nothing before what it reads is complete, so are the requests and lengths that its rows were made from."""
    if step.plans.scores:
        return
    parts = [(step.request[part], step.lengths[part]) for part in _scored_at_a_time(step)]
    step.plans.scores = tuple(index_scores.plan(step.page_table, *rows, settled=True) for rows in parts)
    step.plans.selections = tuple(top_k.plan(lengths, request, index_topk) for request, lengths in parts)


def _scored_at_a_time(step: Step) -> list[slice]:
    """The rows in parts whose index scores keep to `step.score_bytes`."""
    num_rows, height = step.request.shape[0], score_rows(step.score_bytes, step.page_table.shape[1] * PAGE_SIZE)
    return [slice(first, min(first + height, num_rows)) for first in range(0, num_rows, height)]


def select(q: Tensor, gates: Tensor, keys: Tensor, step: Step, index_topk: int) -> Selection:
    """The `index_topk` keys that each row's indexer scores highest among those it may see.

    A few rows at a time, so that the scores keep to `step.score_bytes` however long the context is; no bit depends on how many.

    score(n, j) = sum_h gate_h(n) * relu(q_h(n) . k(j)); gates hold the constants I^-1/2 * X^-1/2.

    Args:
        q: [T, I, X] index queries, rotated, and rounded where the cache holds bytes.
        gates: [T, I] float32, one per index head.
        keys: paged index keys; those of the rows themselves are stored.
        step: where the rows stand.
        index_topk: S, how many keys a row attends to at most.
    """
    tiles = _scored_at_a_time(step)
    parts: list[tuple[Tensor, Tensor]] = []
    unplanned = [None] * len(tiles)
    plans = zip(tiles, step.plans.scores or unplanned, step.plans.selections or unplanned, strict=True)
    for tile, score_plan, select_plan in plans:
        table, request, lengths = step.page_table, step.request[tile], step.lengths[tile]
        scores = index_scores(q[tile], gates[tile], keys, table, request, lengths, score_plan)
        parts.append(top_k(scores, lengths, index_topk, table, request, select_plan))
    if len(parts) == 1:
        return Selection(*parts[0])
    slots, counts = zip(*parts, strict=True)
    return Selection(torch.cat(slots), torch.cat(counts))
