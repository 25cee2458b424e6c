"""Norms, rotary embedding and the gated activation: everything that treats one row, or one head of one row, at a time.

Owns the meaning of each and its cases. Knows no weights' storage format and no cache. Called by `legato.model`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.invariant import map_elements
from legato.ops.op import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D], weight [D] -> [..., D] in x's dtype, computed in float32 and rounded once at the end.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return functional.rms_norm(x.to(torch.float32), weight.shape, weight.to(torch.float32), eps).to(x.dtype)


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. The indexer's key norm, eps 1e-6.

    x [..., X], weight and bias [X] -> [..., X] in x's dtype, computed in float32. Source: Ba et al. 2016,
    arXiv:1607.06450.
    """
    weight, bias = weight.to(torch.float32), bias.to(torch.float32)
    return functional.layer_norm(x.to(torch.float32), weight.shape, weight, bias, eps).to(x.dtype)


@op
def rope_angles(positions: Tensor, theta: float, dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i/dim) for i in 0..dim/2.

    positions [T] integers, theta the base, dim = R -> two float32 [T, R/2]. The angle is rounded to float32, as in
    training: at position 10^6 it has an error of up to 0.03 rad that the model has learnt. Once per step; all layers
    share it. Source: Su et al. 2021, arXiv:2104.09864.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.to(torch.float32).unsqueeze(-1) * (1.0 / theta**exponents)
    return map_elements(torch.cos, angles), map_elements(torch.sin, angles)


@op
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
    """Rotate the pairs (x[start+2i], x[start+2i+1]) by angle i; every other dimension passes through. Results stay in
    place.

    x [T, h, d], cos and sin [T, R/2] float32, start + R <= d -> [T, h, d] in x's dtype. Main heads: start = N; shared
    key: 0; indexer: 0. Source: arXiv:2104.09864, equation 34.
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
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension and up the second.

    gate_up [T, 2F] -> [T, F] in its dtype, computed in float32; no clamp. Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (map_elements(functional.silu, gate) * up).to(gate_up.dtype)
