"""Norms, rotary embedding and the gated activation: everything that treats one row, or one head of one row, at a time.

Owns the meaning of each and its cases. Knows no weights' storage format and no cache. Called by `legato.model`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.case import BFLOAT16, FLOAT32, Case, Draw, Tolerance
from legato.ops.invariant import float32, map_elements
from legato.ops.op import Op, op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D], weight [D] -> [..., D] in x's dtype, computed in float32 and rounded once at the end.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    normed = functional.rms_norm(float32(x), weight.shape, float32(weight), eps)
    return normed if x.dtype is torch.float32 else normed.to(x.dtype)


@op(reference_ok=True)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. The indexer's key norm, eps 1e-6.

    x [..., X], weight and bias [X] -> [..., X] in x's dtype, computed in float32. Source: Ba et al. 2016,
    arXiv:1607.06450.
    """
    return functional.layer_norm(float32(x), weight.shape, float32(weight), float32(bias), eps).to(x.dtype)


@op(reference_ok=True)
def rope_angles(positions: Tensor, theta: float, dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i/dim) for i in 0..dim/2.

    positions [T] integers, theta the base, dim = R -> two float32 [T, R/2]. The angle is rounded to float32, as in
    training: at position 10^6 it has an error of up to 0.03 rad that the model has learnt. Once per step; all layers
    share it. Source: Su et al. 2021, arXiv:2104.09864.
    """
    frequencies = rope_frequencies(positions.device, theta, dim)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return map_elements(torch.cos, angles), map_elements(torch.sin, angles)


@cache
def _frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """theta^(-2i/dim) in float64 on the host: the float32 powers of two devices differ in the last bit, and at position
    10^6 that bit is 0.05 rad."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


@cache
def rope_frequencies(device: torch.device, theta: float, dim: int) -> Tensor:
    """theta^(-2i/dim) for i in 0..dim/2, float32 [dim/2]: made once per device, since a graph that is being captured cannot
    copy from the host. For `rope_angles` and the kernels that compute angles themselves."""
    return torch.tensor(_frequencies(theta, dim), dtype=torch.float32, device=device)


@op(reference_ok=True)
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
    """Rotate the pairs (x[start+2i], x[start+2i+1]) by angle i; every other dimension passes through. Results stay in
    place.

    x [T, h, d], cos and sin [T, R/2] float32, start + R <= d, start and d even -> [T, h, d] in x's dtype.
    Main heads: start = N; shared key and indexer: start = 0. Source: arXiv:2104.09864, equation 34.
    """
    turned = x.to(torch.float32, copy=True)
    pairs = torch.view_as_complex(turned[..., start : start + 2 * cos.shape[-1]].unflatten(-1, (-1, 2)))
    pairs.mul_(torch.complex(cos, sin).unsqueeze(-2))
    return turned.to(x.dtype)


@op(reference_ok=True)
def rope_half(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
    """Rotate the pairs (x[start+i], x[start+R/2+i]) by angle i; every other dimension passes through. Results stay in
    place.

    Shapes as `rope_interleaved`. Only checkpoints whose `indexer_rope_interleave` is false use it, and the tests that
    must fail with it.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = x.to(torch.float32, copy=True)
    first, second = turned[..., start : start + half].clone(), turned[..., start + half : start + 2 * half].clone()
    turned[..., start : start + half] = first * cos - second * sin
    turned[..., start + half : start + 2 * half] = second * cos + first * sin
    return turned.to(x.dtype)


@op
def embed_norm(ids: Tensor, embed: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The embeddings of tokens, and rms_norm of them: what goes into the first layer.

    ids [T] int64, embed [W, D], weight [D] -> [T, D] and [T, D] in embed's dtype.
    """
    h = functional.embedding(ids, embed)
    return h, rms_norm.reference(h, weight, eps)


@op
def mtp_inputs(
    ids: Tensor, positions: Tensor, hidden: Tensor, embed: Tensor, enorm: Tensor, hnorm: Tensor, eps: float
) -> Tensor:
    """What the MTP layer's first product reads: [rms_norm(embedding) ; rms_norm(hidden)].

    ids [T] int64 tokens, positions [T] int64 (the embedding of a row at position 0 is zero, as in training), hidden [T, D],
    embed [W, D], enorm and hnorm [D] -> [T, 2D] in hidden's dtype. Source: arXiv:2412.19437, section 2.2.
    """
    e = functional.embedding(ids, embed) * (positions > 0).to(embed.dtype)[:, None]
    return torch.cat((rms_norm.reference(e, enorm, eps), rms_norm.reference(hidden, hnorm, eps)), dim=-1)


@op
def mtp_looked_up(
    ids: Tensor, positions: Tensor, hidden: Tensor, table: Tensor, hnorm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What the MTP layer's first product reads and adds where the embeddings' part of it is a table: (table[ids], zeros at
    position 0; rms_norm(hidden)).

    ids and positions [T] int64, hidden [T, D], table [W, P], hnorm [D] -> [T, P], [T, D] in hidden's dtype.
    """
    part = functional.embedding(ids, table) * (positions > 0).to(table.dtype)[:, None]
    return part, rms_norm.reference(hidden, hnorm, eps)


@op
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension and up the second.

    gate_up [T, 2F] -> [T, F] in its dtype, computed in float32; no clamp. Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = float32(gate_up).chunk(2, dim=-1)
    product = map_elements(functional.silu, gate) * up
    return product if gate_up.dtype is torch.float32 else product.to(gate_up.dtype)


def _norm_case(rows: int, width: int, dtype: torch.dtype) -> Case:
    return Case(
        rms_norm,
        f"rms_norm rows={rows} width={width} {str(dtype)[6:]}",
        lambda draw: (draw.normal(rows, width, dtype=dtype), 1 + draw.normal(width, dtype=dtype, scale=0.3), 1e-5),
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=(2 * rows + 1) * width * dtype.itemsize,
    )


def _embed_case(rows: int, width: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        ids = draw.integers(rows, low=0, high=500, dtype=torch.int64)
        return ids, draw.normal(500, width, dtype=dtype), 1 + draw.normal(width, dtype=dtype, scale=0.3), 1e-5

    return Case(
        embed_norm,
        f"embed_norm rows={rows} width={width} {str(dtype)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=(3 * rows + 1) * width * dtype.itemsize,
    )


def _mtp_case(rows: int, width: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        ids, positions = (draw.integers(rows, low=0, high=500, dtype=torch.int64) for _ in range(2))
        positions[rows // 2] = 0
        norms = (1 + draw.normal(width, dtype=dtype, scale=0.3) for _ in range(2))
        return ids, positions, draw.normal(rows, width, dtype=dtype), draw.normal(500, width, dtype=dtype), *norms, 1e-5

    return Case(
        mtp_inputs,
        f"mtp_inputs rows={rows} width={width} {str(dtype)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=(4 * rows + 2) * width * dtype.itemsize,
    )


def _looked_up_case(rows: int, widths: tuple[int, int], dtype: torch.dtype) -> Case:
    """`widths`: of a row of the table, and of the hidden state."""
    part, width = widths

    def make(draw: Draw) -> tuple[Any, ...]:
        ids, positions = (draw.integers(rows, low=0, high=500, dtype=torch.int64) for _ in range(2))
        positions[rows // 2] = 0
        norm = 1 + draw.normal(width, dtype=dtype, scale=0.3)
        return ids, positions, draw.normal(rows, width, dtype=dtype), draw.normal(500, part, dtype=dtype), norm, 1e-5

    return Case(
        mtp_looked_up,
        f"mtp_looked_up rows={rows} part={part} width={width} {str(dtype)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=(2 * rows * part + (2 * rows + 1) * width) * dtype.itemsize,
    )


def _layer_norm_case(rows: int) -> Case:
    return Case(
        layer_norm,
        f"layer_norm rows={rows} width=128",
        lambda draw: (draw.normal(rows, 128), 1 + draw.normal(128, scale=0.3), draw.normal(128, scale=0.1), 1e-6),
        bytes=(2 * rows + 2) * 128 * 4,
    )


def _rope_case(rotate: Op[..., Tensor], rows: int, heads: int, width: int, start: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        cos, sin = rope_angles.reference(draw.integers(rows, low=0, high=1 << 20), 8e6, 64)
        return draw.normal(rows, heads, width), cos, sin, start

    name = f"{rotate.name} rows={rows} heads={heads} width={width} start={start}"
    return Case(rotate, name, make, bytes=8 * rows * heads * width)


CASES = (
    *(
        _norm_case(rows, width, dtype)
        for rows, width, dtype in (
            (1, 6144, torch.float32),
            (6, 6144, torch.bfloat16),
            (6, 2048, torch.bfloat16),
            (37, 512, torch.float32),
        )
    ),
    *(_mtp_case(*shape) for shape in ((1, 6144, torch.bfloat16), (6, 6144, torch.bfloat16), (9, 256, torch.float32))),
    *(_embed_case(*shape) for shape in ((1, 6144, torch.bfloat16), (6, 6144, torch.bfloat16), (9, 256, torch.float32))),
    *(_looked_up_case(rows, (768, 6144), torch.bfloat16) for rows in (1, 6)),
    _looked_up_case(9, (256, 256), torch.float32),
    *(_layer_norm_case(rows) for rows in (1, 6, 37)),
    Case(
        rope_angles,
        "rope_angles up to position 2^20",
        lambda draw: (draw.listed(0, 1, 63, 64, 4095, 131072, 1048575), 8e6, 64),
        # At 2^20 one float32 rounding of the angle is 0.03 rad; the oracle rounds where the contract says.
        Tolerance(0.0, 1e-6),
    ),
    *(
        _rope_case(rope_interleaved, *shape)
        for shape in ((1, 8, 256, 192), (6, 64, 256, 192), (6, 1, 64, 0), (37, 32, 128, 0))
    ),
    _rope_case(rope_half, 6, 32, 128, 0),
    *(
        Case(
            swiglu,
            f"swiglu rows={rows} width={width}",
            lambda draw, rows=rows, width=width: (draw.normal(rows, 2 * width, scale=3.0),),
            bytes=12 * rows * width,
        )
        for rows, width in ((1, 256), (6, 2048), (37, 32))
    ),
)
