"""The product by PyTorch's library, as several implementations hand it on.

Owns how a residual goes in: rounded once, as by the kernels. Called by `sm90.py`, `cutedsl.py` and `cublas.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def by_library(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T (+ residual [T, N]), all of one dtype -> [T, N] of it."""
    return functional.linear(x, weight) if residual is None else torch.addmm(residual, x, weight.t())
