"""Matrix products of a few rows with a stored weight, one op per storage format, and the per-head product of absorbed
attention.

Owns what `x @ W.T` means for each format. Activations are never quantised (W4A16, W8A16). Knows no layer. Called by
`legato.quant` and, for `linear_heads`, by `legato.model`. The byte layouts are in `dequantize.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.gemm.best import linear_bf16_best as linear_bf16_best
from legato.ops.gemm.best import linear_fp8_block_best as linear_fp8_block_best
from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.invariant import ROW_BLOCK, float32, matmul, pack_columns
from legato.ops.op import op
from legato.ops.pointwise import rms_norm, swiglu


def _linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    product = matmul(x, weight)
    if residual is not None:
        product = product + float32(residual)
    return product if x.dtype is torch.float32 else product.to(x.dtype)


@op(pack=pack_columns)
def linear_bf16(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ residual), accumulated in float32 and rounded once to x's dtype.

    x [T, K], weight [N, K] bfloat16 or float32, as stored or as `linear_bf16.pack` made it, residual [T, N] -> [T, N].
    """
    return _linear(x, weight, residual)


@op(pack=pack_columns)
def linear_bf16_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(x, norm, eps) @ weight.T: a product whose rows are normed on the way in.

    x [T, K], norm [K], weight [N, K] bfloat16 or float32, as stored or as `linear_bf16_normed.pack` made it -> [T, N].
    """
    return _linear(rms_norm.reference(x, norm, eps), weight, None)


@op(pack=pack_columns)
def linear_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """swiglu(x @ gate_up.T): the first product of a SwiGLU with its activation. What is rounded in between is rounded to
    x's dtype, as by two ops.

    x [T, K], gate_up [2F, K] bfloat16 or float32 (gate rows, then up rows), as stored or as `linear_swiglu.pack` made it
    -> [T, F]. Source: Shazeer 2020, arXiv:2002.05202.
    """
    return swiglu.reference(_linear(x, gate_up, None))


@op
def linear_draft(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for logits that only draft: the target verifies whatever they choose, so no promise is made about a
    row's bits in other company, and the library's fastest product serves.

    x [T, K], weight [N, K] bfloat16 or float32 as stored -> [T, N] in x's dtype, accumulated in float32.
    """
    return functional.linear(float32(x), float32(weight)).to(x.dtype)


@op
def linear_fp8_block(x: Tensor, weight: Tensor, scale_inv: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ W.T (+ residual) where W is stored as e4m3 with one float32 scale per 128x128 block; see
    `dequantize_fp8_block`.

    x [T, K], weight e4m3 [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)], residual [T, N] -> [T, N] in x's dtype.
    Raises ValueError where the scale's shape does not fit the weight's.
    """
    return _linear(x, dequantize_fp8_block(weight, scale_inv), residual)


@op
def linear_fp8_block_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor, scale_inv: Tensor) -> Tensor:
    """rms_norm(x, norm, eps) @ W.T where W is stored as for `linear_fp8_block`: its rows are normed on the way in.

    x [T, K], norm [K], weight e4m3 [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)] -> [T, N] in x's dtype.
    """
    return linear_fp8_block.reference(rms_norm.reference(x, norm, eps), weight, scale_inv)


@op
def linear_nvfp4(x: Tensor, packed: Tensor, scale: Tensor, scale_2: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ W.T (+ residual) where W is stored as NVFP4; see `dequantize_nvfp4`.

    x [T, K], packed uint8 [N, K/2], scale e4m3 [N, K/16], scale_2 float32 [] or [N], residual [T, N] -> [T, N] in x's
    dtype. Raises ValueError where the scales' shapes do not fit the weight's.
    """
    return _linear(x, dequantize_nvfp4(packed, scale, scale_2), residual)


@op
def linear_int4(x: Tensor, packed: Tensor, scale: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ W.T (+ residual) where W is stored as INT4 in groups of 128; see `dequantize_int4`.

    x [T, K], packed uint8 [N, K/2], scale bfloat16 or float32 [N, K/128], residual [T, N] -> [T, N] in x's dtype.
    Raises ValueError where the scale's shape does not fit the weight's.
    """
    return _linear(x, dequantize_int4(packed, scale), residual)


@op
def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's rows times that head's own matrix: out[t, h] = weight[h] @ x[t, h].

    x [T, H, K], weight [H, N, K] bfloat16 or float32 (any strides) -> [T, H, N] in x's dtype, accumulated in float32.
    The two products of absorbed attention: the query into latent space with w_uk.transpose(1, 2) [H, C, N], the output
    out of it with w_uv [H, V, C].
    """
    columns = float32(weight).transpose(1, 2)
    missing = -x.shape[0] % ROW_BLOCK
    rows = torch.constant_pad_nd(float32(x), (0, 0, 0, 0, 0, missing)).transpose(0, 1)
    if rows.shape[1] == ROW_BLOCK:
        products = torch.bmm(rows, columns).transpose(0, 1)
    else:
        products = torch.cat([torch.bmm(block, columns).transpose(0, 1) for block in rows.split(ROW_BLOCK, dim=1)])
    return products[: x.shape[0]].to(x.dtype)


from legato.ops.gemm.cases import CASES as CASES  # noqa: E402  behind the ops that they name
