"""What stands between attention's two input products and the selection of tokens: norms, rotation, the query's way into
latent space, rounding, and the stores into both caches.

Owns what these mean together, for a layer that reuses a selection (`prologue_shared`) and one with an indexer
(`prologue_full`), and the rounding of index queries. Composed of the bodies of `pointwise`, `gemm` and `cache`. Called by
`legato.model` on every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from legato.ops.cache import index_cache, latent_cache, read_latent_rows, store_index_keys, store_latent
from legato.ops.cache.layout import e4m3_to_float, index_page_views, quantize_groups
from legato.ops.case import BFLOAT16, EXACT, Case, Draw, Tolerance
from legato.ops.gemm import linear_bf16, linear_bf16_normed, linear_heads
from legato.ops.op import op
from legato.ops.pointwise import layer_norm, rms_norm, rope_angles, rope_half, rope_interleaved

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
def prologue_shared(qkv: Tensor, q: Tensor, w_uk: Tensor, norm: LatentNorm, places: Places, cache: Tensor) -> Tensor:
    """The query as absorbed attention wants it; the rows' latents and rope keys are stored on the way.

    qkv [T, Q+C+R]: query latent (not read here), key-value latent before its norm, rope key before its rotation;
    q [T, H*(N+R)]: each head's query; w_uk [H, N, C], as stored or as `pack` made it; cache: any latent layout, written at
    `places.slots` -> [T, H, C+R] in q's dtype: the nope part times the head's w_uk, then the rope part, rotated.
    Every step is rounded to q's dtype, as if it stood alone. Raises ValueError where widths or layouts do not fit.
    Source: arXiv:2405.04434, section 2.1 and appendix C.
    """
    _check_widths(qkv, q, w_uk, places, 0)
    _store_latents(qkv, w_uk, norm, places, cache)
    return _absorbed(q, w_uk, places)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """`prologue_shared`, and the indexer's part of the same products; index keys are stored too.

    qkv [T, Q+C+R+X+I]: behind the above the index key before its norm, and one gate per index head; q [T, H*(N+R)+I*X]:
    behind the heads' queries the index queries; cache: any latent layout; keys: any index layout. Both are written at
    `places.slots` -> (q [T, H, C+R], index queries [T, I, X], gates [T, I] float32). Keys and queries of the indexer are
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
    return _absorbed(q[:, : q.shape[1] - own], w_uk, places), queries, gates


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


def _absorbed(q: Tensor, w_uk: Tensor, places: Places) -> Tensor:
    heads, nope, _ = w_uk.shape
    q = q.reshape(q.shape[0], heads, nope + 2 * places.cos.shape[1])
    q = rope_interleaved.reference(q, places.cos, places.sin, nope)
    return torch.cat((linear_heads.reference(q[..., :nope], w_uk.transpose(1, 2)), q[..., nope:]), dim=-1)


@dataclass(frozen=True)
class _Shape:
    """Of a case: Q, H, N; C, R, I and X are GLM-5.2's."""

    rank: int
    heads: int
    nope: int


#: The checkpoint that ships with Legato, and GLM-5.2 on one rank of eight.
_SMALL, _RANK_OF_8 = _Shape(128, 4, 64), _Shape(2048, 8, 192)
_LATENT, _ROPE, _INDEX_HEADS, _INDEX = 512, 64, 32, 128


def _places(draw: Draw, rows: int, pages: int) -> Places:
    cos, sin = rope_angles.reference(draw.integers(rows, low=0, high=1 << 20), 8e6, _ROPE)
    slots = draw.distinct(rows, pages * 64)
    skipped = torch.arange(rows, device=draw.device) % 5 == 3
    return Places(cos, sin, slots.masked_fill_(skipped, -1))


def _as_numbers(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Byte caches read back: one step of rounding may fall the other way where two bodies round a norm differently."""
    read: list[Tensor] = []
    for output in outputs:
        if output.dtype == torch.uint8 and output.dim() == 3:
            every = torch.arange(output.shape[0] * output.shape[1], device=output.device)
            read.append(read_latent_rows(output, every))
        elif output.dtype == torch.uint8:
            codes, scales = index_page_views(output)
            read.append(e4m3_to_float(codes).mul_(scales.unsqueeze(-1)))
        else:
            read.append(output)
    return tuple(read)


def _case(name: str, shape: _Shape, rows: int, dtype: torch.dtype, caches: tuple[torch.dtype, torch.dtype]) -> Case:
    full, on = name == "full", "any" if shape is _SMALL else "gpu"
    index_width = _INDEX_HEADS * _INDEX if full else 0

    def make(draw: Draw) -> tuple[Any, ...]:
        pages = 6 if rows <= 384 else -(-rows // 64)
        qkv = draw.normal(rows, shape.rank + _LATENT + _ROPE + ((_INDEX + _INDEX_HEADS) if full else 0), dtype=dtype)
        q = draw.normal(rows, shape.heads * (shape.nope + _ROPE) + index_width, dtype=dtype)
        w_uk = draw.normal(shape.heads, shape.nope, _LATENT, dtype=dtype, scale=shape.nope**-0.5)
        norm = LatentNorm(1 + draw.normal(_LATENT, dtype=dtype, scale=0.2), 1e-5)
        cache = latent_cache(draw, caches[0], pages)
        if not full:
            return qkv, q, w_uk, norm, _places(draw, rows, pages), cache
        weight, bias = 1 + draw.normal(_INDEX, dtype=dtype, scale=0.2), draw.normal(_INDEX, dtype=dtype, scale=0.1)
        index_norm = IndexNorm(weight, bias, 1e-6)
        return qkv, q, w_uk, norm, index_norm, _places(draw, rows, pages), cache, index_cache(draw, caches[1], pages)

    outputs, inputs = shape.heads * _LATENT, shape.heads * shape.nope
    token_bytes = 656 if caches[0] == torch.uint8 else 576 * caches[0].itemsize
    extra = _INDEX * 2 + _INDEX_HEADS * 6 + index_width * 3 + 132 if full else 0
    moved = rows * (
        (_LATENT + _ROPE + inputs + outputs + 2 * shape.heads * _ROPE) * dtype.itemsize + token_bytes + extra
    )
    rounded = caches[0] == torch.uint8 or (full and caches[1] == torch.uint8)
    return Case(
        prologue_full if full else prologue_shared,
        f"prologue_{name} rows={rows} heads={shape.heads} nope={shape.nope} {str(dtype)[6:]} latent={str(caches[0])[6:]}"
        + (f" keys={str(caches[1])[6:]}" if full else ""),
        make,
        Tolerance(2.0**-3, 2.0**-5) if rounded else BFLOAT16 if dtype == torch.bfloat16 else Tolerance(1e-5, 3e-5),
        mutates=(6, 7) if full else (5,),
        weights=(2,),
        bytes=outputs * shape.nope * dtype.itemsize + moved,
        flops=2 * rows * outputs * shape.nope,
        on=on,
        defined=_as_numbers,
    )


def _scored(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Index queries, and the keys that this call stored, by what they are for: a quarter of their scores. A rotation of both
    changes nothing there but which way e4m3 rounds, by 0.2 in 16,000 scores of size 0.75."""
    if arguments[6] is None:
        return _as_numbers(arguments, outputs)
    q, index_q, gates, cache, keys = outputs
    cache, keys = _as_numbers(arguments, (cache, keys))
    slots = arguments[7].slots
    stored = keys.flatten(0, -2)[slots[slots >= 0].long()]
    dots = torch.einsum("tix,kx->tik", index_q.float(), stored)
    return q, torch.einsum("ti,tik->tk", gates / 4, dots.relu_()), cache


def _chain_case(name: str, rows: int, hidden: int, shape: _Shape, dtype: torch.dtype) -> Case:
    full = name == "full"
    first = shape.rank + _LATENT + _ROPE + (_INDEX + _INDEX_HEADS if full else 0)
    second = shape.heads * (shape.nope + _ROPE) + (_INDEX_HEADS * _INDEX if full else 0)

    def make(draw: Draw) -> tuple[Any, ...]:
        def norm(width: int) -> Tensor:
            return 1 + draw.normal(width, dtype=dtype, scale=0.2)

        return (
            draw.normal(rows, hidden, dtype=dtype),
            draw.normal(first, hidden, dtype=dtype, scale=hidden**-0.5),
            draw.normal(second, shape.rank, dtype=dtype, scale=shape.rank**-0.5),
            draw.normal(shape.heads, shape.nope, _LATENT, dtype=dtype, scale=shape.nope**-0.5),
            LatentNorm(norm(shape.rank), 1e-5),
            LatentNorm(norm(_LATENT), 1e-5),
            IndexNorm(norm(_INDEX), draw.normal(_INDEX, dtype=dtype, scale=0.1), 1e-6) if full else None,
            _places(draw, rows, 6),
            latent_cache(draw, dtype),
            index_cache(draw, torch.uint8) if full else None,
        )

    numbers = first * hidden + second * shape.rank + shape.heads * shape.nope * _LATENT
    return Case(
        prologue_bf16,
        f"prologue_bf16 {name} rows={rows} hidden={hidden} heads={shape.heads} nope={shape.nope} {str(dtype)[6:]}",
        make,
        Tolerance(2.0**-4, 2.0**-3),
        mutates=(8, 9) if full else (8,),
        weights=(1, 2, 3),
        bytes=numbers * dtype.itemsize,
        flops=2 * rows * numbers,
        on="any" if shape is _SMALL else "gpu",
        defined=_scored,
    )


_BYTES, _BF16, _F32 = torch.uint8, torch.bfloat16, torch.float32
CASES = (
    *(
        Case(
            quantize_index_query,
            f"quantize_index_query rows={rows} {str(dtype)[6:]}",
            lambda draw, rows=rows, dtype=dtype: (draw.normal(rows, 32, 128, dtype=dtype), draw.normal(rows, 32)),
            EXACT,
            bytes=rows * 32 * (128 * (dtype.itemsize + 1) + 8),
        )
        for rows, dtype in ((1, torch.float32), (6, torch.bfloat16), (9, torch.float32))
    ),
    *(
        _case(name, _SMALL, rows, dtype, caches)
        for name in ("shared", "full")
        for rows, dtype, caches in (
            (1, _F32, (_F32, _F32)),
            (9, _F32, (_BF16, _BYTES)),
            (6, _BF16, (_BF16, _BYTES)),
            (16, _BF16, (_BYTES, _BYTES)),
        )
    ),
    *(
        _case(name, _RANK_OF_8, rows, _BF16, (latent, _BYTES))
        for name in ("shared", "full")
        for rows in (1, 6, 16, 128)
        for latent in (_BF16, _BYTES)
    ),
    *(_chain_case(name, 6, 64, _SMALL, _F32) for name in ("shared", "full")),
    *(_chain_case(name, rows, 6144, _RANK_OF_8, _BF16) for name in ("shared", "full") for rows in (1, 6, 16, 128)),
)
