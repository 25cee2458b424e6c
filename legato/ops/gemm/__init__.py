"""Matrix products of a few rows with a stored weight, one op per storage format, and the per-head product of absorbed
attention.

Owns what `x @ W.T` means for each format. Activations are never quantised (W4A16, W8A16). Knows no layer. Called by
`legato.quant` and, for `linear_heads`, by `legato.model`. The byte layouts are in `dequantize.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.invariant import ROW_BLOCK, matmul
from legato.ops.op import op


def _linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    product = matmul(x, weight)
    if residual is not None:
        product = product + residual.to(torch.float32)
    return product.to(x.dtype)


@op
def linear_bf16(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ residual), accumulated in float32 and rounded once to x's dtype.

    x [T, K], weight [N, K] bfloat16 or float32, residual [T, N] -> [T, N].
    """
    return _linear(x, weight, residual)


@op
def linear_fp8_block(x: Tensor, weight: Tensor, scale_inv: Tensor, residual: Tensor | None = None) -> Tensor:
    """x @ W.T (+ residual) where W is stored as e4m3 with one float32 scale per 128x128 block; see
    `dequantize_fp8_block`.

    x [T, K], weight e4m3 [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)], residual [T, N] -> [T, N] in x's dtype.
    Raises ValueError where the scale's shape does not fit the weight's.
    """
    return _linear(x, dequantize_fp8_block(weight, scale_inv), residual)


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
    columns = weight.to(torch.float32).transpose(1, 2)
    rows = x.to(torch.float32)
    padded = functional.pad(rows, (0, 0, 0, 0, 0, -x.shape[0] % ROW_BLOCK)).transpose(0, 1)
    products = [torch.bmm(block, columns).transpose(0, 1) for block in padded.split(ROW_BLOCK, dim=1)]
    return torch.cat(products)[: x.shape[0]].to(x.dtype)
