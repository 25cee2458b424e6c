"""What stands between attention's two input products and the selection of tokens: norms, rotation, the query's way into
latent space, rounding, and the stores into both caches.

Owns what these mean together, for a layer that reuses a selection (`prologue_shared`) and one with an indexer
(`prologue_full`), and the rounding of index queries. Composed of the bodies of `pointwise`, `gemm` and `cache`. Called by
`legato.model` on every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from legato.ops.cache import store_index_keys, store_latent
from legato.ops.cache.layout import quantize_groups
from legato.ops.gemm import linear_bf16, linear_bf16_normed, linear_heads
from legato.ops.op import op
from legato.ops.pointwise import layer_norm, rms_norm, rope_half, rope_interleaved

Rotation = Literal["interleaved", "half"]


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """The RMSNorm of the key-value latent: weight [C], eps."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """The LayerNorm of the index key, weight and bias [X], and how index keys and queries are rotated."""

    weight: Tensor
    bias: Tensor
    eps: float
    rotation: Rotation = "interleaved"


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows stand: cos and sin [T, R/2] float32 at their positions, slots [T] int32 in the caches (-1: nowhere)."""

    cos: Tensor
    sin: Tensor
    slots: Tensor


@op(reference_ok=True)
def quantize_index_query(q: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Round each head's query to e4m3 under a power-of-two scale (rounded up) and multiply that scale into the head's
    gate.

    q [T, I, X] float32 or bfloat16 (rotated), gates [T, I] float32 (already times I^-0.5 X^-0.5)
    -> (q e4m3 [T, I, X], gates float32 [T, I]). ReLU is homogeneous, so gate * relu(scale * q8 . k) = (gate * scale) *
    relu(q8 . k). Source: the indexer of DeepSeek-V3.2-Exp.
    """
    codes, scale = quantize_groups(q.to(torch.float32))
    return codes, gates * scale.squeeze(-1)


@op
def prologue_shared(
    qkv: Tensor, q: Tensor, w_uk: Tensor, norm: LatentNorm, places: Places, cache: Tensor, whole: bool = False
) -> Tensor:
    """The query as absorbed attention wants it; the rows' latents and rope keys are stored on the way.

    qkv [T, Q+C+R]: query latent (not read here), key-value latent before its norm, rope key before its rotation;
    q [T, H*(N+R)]: each head's query; w_uk [H, N, C], as stored or as `pack` made it; cache: any latent layout, written at
    `places.slots` -> [T, H, C+R] in q's dtype: the nope part times the head's w_uk, then the rope part, rotated; `whole`:
    [T, H, N+R], the nope part as it is, for attention over keys of each head; q may be overwritten by it.
    Every step is rounded to q's dtype, as if it stood alone. Raises ValueError where widths or layouts do not fit.
    Source: arXiv:2405.04434, section 2.1 and appendix C.
    """
    _check_widths(qkv, q, w_uk, places, 0)
    _store_latents(qkv, w_uk, norm, places, cache)
    return _absorbed(q, w_uk, places, whole)


@op
def prologue_full(
    qkv: Tensor,
    q: Tensor,
    w_uk: Tensor,
    norm: LatentNorm,
    index_norm: IndexNorm,
    places: Places,
    cache: Tensor,
    keys: Tensor,
    whole: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`prologue_shared`, and the indexer's part of the same products; index keys are stored too.

    qkv [T, Q+C+R+X+I]: behind the above the index key before its norm, and one gate per index head; q [T, H*(N+R)+I*X]:
    behind the heads' queries the index queries; cache: any latent layout; keys: any index layout. Both are written at
    `places.slots` -> (q as there, index queries [T, I, X], gates [T, I] float32). Keys and queries of the indexer are
    rotated in their *first* R numbers (the main heads have the rotation last); gates are times I^-0.5 X^-0.5. A byte cache
    holds e4m3 keys, and then the queries are rounded likewise and their scales multiplied into the gates
    (`quantize_index_query`); otherwise the queries have q's dtype. No Hadamard transform: it would cancel in the product.
    Raises ValueError where widths or layouts do not fit. Source: arXiv:2512.02556, section 2.1.
    """
    width, heads = index_norm.weight.shape[0], w_uk.shape[0]
    own = q.shape[1] - heads * (w_uk.shape[1] + 2 * places.cos.shape[1])
    index_heads = own // width
    _check_widths(qkv, q, w_uk, places, index_heads * width)
    first = qkv.shape[1] - width - index_heads
    _store_latents(qkv[:, :first], w_uk, norm, places, cache)

    rotate = rope_interleaved.reference if index_norm.rotation == "interleaved" else rope_half.reference
    key = layer_norm.reference(qkv[:, first : first + width], index_norm.weight, index_norm.bias, index_norm.eps)
    key = rotate(key[:, None], places.cos, places.sin, 0)[:, 0]
    store_index_keys.reference(keys, key, places.slots)

    queries = q[:, q.shape[1] - own :].reshape(q.shape[0], index_heads, width)
    queries = rotate(queries, places.cos, places.sin, 0)
    gates = qkv[:, first + width :].float() * (index_heads**-0.5 * width**-0.5)
    if keys.dtype == torch.uint8:
        queries, gates = quantize_index_query.reference(queries, gates)
    return _absorbed(q[:, : q.shape[1] - own], w_uk, places, whole), queries, gates


@op
def prologue_bf16(
    x: Tensor,
    qkv_weight: Tensor,
    q_weight: Tensor,
    w_uk: Tensor,
    q_norm: LatentNorm,
    norm: LatentNorm,
    index_norm: IndexNorm | None,
    places: Places,
    cache: Tensor,
    keys: Tensor | None,
) -> tuple[Tensor, ...]:
    """`prologue_full`, or `prologue_shared` where there are no `index_norm` and `keys`, with the two products before it: all
    that a layer does between its normed hidden states and the selection, over bfloat16 or float32 weights. The model makes
    the same calls with weights of any format; here they are one op so that whole chains can be compared.

    x [T, D], qkv_weight [Q+C+R(+X+I), D], q_weight [H*(N+R)(+I*X), Q], q_norm: of the query latent; the others, the result
    (a tuple of one without an indexer) and what is written as there.
    """
    qkv = linear_bf16.reference(x, qkv_weight)
    q = linear_bf16_normed.reference(qkv[:, : q_norm.weight.shape[0]], q_norm.weight, q_norm.eps, q_weight)
    if index_norm is None or keys is None:
        return (prologue_shared.reference(qkv, q, w_uk, norm, places, cache),)
    return prologue_full.reference(qkv, q, w_uk, norm, index_norm, places, cache, keys)


def _check_widths(qkv: Tensor, q: Tensor, w_uk: Tensor, places: Places, index_width: int) -> None:
    heads, nope, latent = w_uk.shape
    rope = 2 * places.cos.shape[1]
    if q.shape[1] != heads * (nope + rope) + index_width:
        expected = f"{heads} * ({nope} + {rope})" + (f" + {index_width} of the indexer" if index_width else "")
        raise ValueError(f"queries are {q.shape[1]} wide, expected {expected} = {heads * (nope + rope) + index_width}")
    if qkv.shape[1] <= latent + rope:
        raise ValueError(
            f"rows of {qkv.shape[1]} hold no query latent before a latent of {latent} and a rope key of {rope}"
        )


def _store_latents(qkv: Tensor, w_uk: Tensor, norm: LatentNorm, places: Places, cache: Tensor) -> None:
    rope = 2 * places.cos.shape[1]
    rank = qkv.shape[1] - w_uk.shape[2] - rope
    latent = rms_norm.reference(qkv[:, rank:-rope], norm.weight, norm.eps)
    rope_key = rope_interleaved.reference(qkv[:, None, -rope:], places.cos, places.sin, 0)[:, 0]
    store_latent.reference(cache, latent, rope_key, places.slots)


def _absorbed(q: Tensor, w_uk: Tensor, places: Places, whole: bool) -> Tensor:
    heads, nope, _ = w_uk.shape
    q = q.reshape(q.shape[0], heads, nope + 2 * places.cos.shape[1])
    q = rope_interleaved.reference(q, places.cos, places.sin, nope)
    if whole:
        return q
    return torch.cat((linear_heads.reference(q[..., :nope], w_uk.transpose(1, 2)), q[..., nope:]), dim=-1)


from legato.ops.prologue.cases import CASES as CASES  # noqa: E402  behind the ops that they name
