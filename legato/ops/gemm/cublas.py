"""The plain product by PyTorch's library: what the kernels are compared with, and a way to bisect.

Owns nothing else. Must not be a target of `bind` by default: a row's bits depend on the number of rows here. Asked for by
name: `--op linear_bf16=cublas`, `legato bench ops gemm -i cublas`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from legato.ops.gemm import linear_bf16


@linear_bf16.on("cublas")
def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """functional.linear, plus the residual in x's dtype."""
    product = functional.linear(x, weight.to(x.dtype))
    return product if residual is None else product + residual.to(x.dtype)
