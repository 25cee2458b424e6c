"""The products by PyTorch's library: what the kernels are compared with, and a way to bisect.

Owns nothing else. Must not be a target of `bind` by default: a row's bits depend on the number of rows here. Asked for by
name: `--op gemm=cublas`, `legato bench ops gemm -i cublas`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.gemm import linear_bf16, linear_bf16_normed, linear_draft, linear_heads, linear_swiglu
from legato.ops.gemm.library import by_library
from legato.ops.pointwise import rms_norm, swiglu


@linear_bf16.on("cublas")
def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """One product in x's dtype; the residual goes in before its result is rounded."""
    return by_library(x, weight.to(x.dtype), None if residual is None else residual.to(x.dtype))


@linear_bf16_normed.on("cublas")
def run_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`rms_norm` as bound, then the product."""
    return run(rms_norm(x, norm, eps), weight)


@linear_swiglu.on("cublas")
def run_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """The product, then `swiglu` as bound."""
    return swiglu(run(x, gate_up))


@linear_draft.on("cublas")
def run_draft(x: Tensor, weight: Tensor) -> Tensor:
    """As `linear_bf16`, without a residual."""
    return run(x, weight)


@linear_heads.on("cublas")
def run_heads(x: Tensor, weight: Tensor) -> Tensor:
    """A batched product over heads."""
    return torch.bmm(x.transpose(0, 1), weight.to(x.dtype).transpose(1, 2)).transpose(0, 1)
