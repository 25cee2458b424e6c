"""The cases of the prologue: the shipped checkpoint, and GLM-5.2 on one rank of eight.

Owns how rows and caches are drawn, and how byte caches are compared. Imported by `prologue`, behind its ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.ops.cache import index_cache, latent_cache, read_latent_rows
from legato.ops.cache.layout import LATENT_BYTES, e4m3_to_float, index_page_views
from legato.ops.case import BFLOAT16, EXACT, Case, Draw, Tolerance
from legato.ops.pointwise import rope_angles
from legato.ops.prologue import (
    IndexNorm,
    LatentNorm,
    Places,
    prologue_bf16,
    prologue_full,
    prologue_shared,
    quantize_index_query,
)


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


def _case(
    name: str,
    shape: _Shape,
    rows: int,
    dtype: torch.dtype,
    caches: tuple[torch.dtype, torch.dtype],
    *,
    whole: bool = False,
) -> Case:
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
            return qkv, q, w_uk, norm, _places(draw, rows, pages), cache, whole
        weight, bias = 1 + draw.normal(_INDEX, dtype=dtype, scale=0.2), draw.normal(_INDEX, dtype=dtype, scale=0.1)
        index_norm = IndexNorm(weight, bias, 1e-6)
        keys = index_cache(draw, caches[1], pages)
        return qkv, q, w_uk, norm, index_norm, _places(draw, rows, pages), cache, keys, whole

    outputs, inputs = shape.heads * _LATENT, shape.heads * shape.nope
    token_bytes = LATENT_BYTES if caches[0] == torch.uint8 else 576 * caches[0].itemsize
    extra = _INDEX * 2 + _INDEX_HEADS * 6 + index_width * 3 + 132 if full else 0
    moved = rows * (
        (_LATENT + _ROPE + inputs + outputs + 2 * shape.heads * _ROPE) * dtype.itemsize + token_bytes + extra
    )
    rounded = caches[0] == torch.uint8 or (full and caches[1] == torch.uint8)
    return Case(
        prologue_full if full else prologue_shared,
        f"prologue_{name} rows={rows} heads={shape.heads} nope={shape.nope} {str(dtype)[6:]} latent={str(caches[0])[6:]}"
        + (f" keys={str(caches[1])[6:]}" if full else "")
        + (" whole" if whole else ""),
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
    *(
        _case(name, _SMALL, 6, dtype, (dtype, _BYTES), whole=True)
        for name in ("shared", "full")
        for dtype in (_F32, _BF16)
    ),
    *(_case(name, _RANK_OF_8, 300, _BF16, (_BF16, _BYTES), whole=True) for name in ("shared", "full")),
    *(_chain_case(name, 6, 64, _SMALL, _F32) for name in ("shared", "full")),
    *(_chain_case(name, rows, 6144, _RANK_OF_8, _BF16) for name in ("shared", "full") for rows in (1, 6, 16, 128)),
)
