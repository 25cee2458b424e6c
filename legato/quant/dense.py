"""Weights kept as floating-point tensors: BF16 checkpoints, and every format dequantised once (`Residency.DENSE`).

Owns `DenseWeight` and `DenseExperts`. Called by the loader; the model only sees the protocols of `legato.quant.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from legato.ops.experts import moe_bf16
from legato.ops.gemm import linear_bf16, linear_bf16_best, linear_bf16_normed, linear_swiglu
from legato.ops.op import REFERENCE, Op
from legato.ops.sample import greedy_keys
from legato.quant.formats import Format
from legato.quant.stack import Stack
from legato.quant.weight import ScaleFault, StackedExperts, Weight

Triple = tuple[Weight, Weight, Weight]
"""Gate, up and down projection of one expert."""


@dataclass(frozen=True)
class DenseWeight:
    """tensor [N, K], bf16 or fp32."""

    tensor: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.DENSE

    @property
    def out_features(self) -> int:
        return self.tensor.shape[0]

    @property
    def in_features(self) -> int:
        return self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @cached_property
    def _packed(self) -> torch.Tensor:
        """As the bound implementation wants it; the tensor itself where that does not care."""
        return linear_bf16.pack(self.tensor)

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear_bf16(x, self._packed, residual)

    @cached_property
    def _packed_normed(self) -> torch.Tensor:
        return linear_bf16_normed.pack(self.tensor)

    def linear_normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return linear_bf16_normed(x, norm, eps, self._packed_normed)

    @cached_property
    def _packed_gated(self) -> torch.Tensor:
        return linear_swiglu.pack(self.tensor)

    def linear_swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return linear_swiglu(x, self._packed_gated)

    @cached_property
    def _packed_best(self) -> torch.Tensor:
        return linear_bf16_best.pack(self.tensor)

    def best_keys(self, x: torch.Tensor, first: int, width: int) -> torch.Tensor:
        if linear_bf16_best.bound.target == REFERENCE:  # then the choice behind the product is faster
            return greedy_keys(self.linear(x)[:, :width], first)
        return linear_bf16_best(x, self._packed_best, first, width)[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor.to(dtype)

    def to(self, device: torch.device) -> DenseWeight:
        return DenseWeight(self.tensor.to(device))

    def fault(self) -> ScaleFault | None:
        return None


@dataclass(frozen=True)
class DenseExperts(StackedExperts):
    """w13 [E, 2F, D] (gate rows, then up rows), w2 [E, D, F], bf16 or fp32."""

    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.DENSE

    @property
    def op(self) -> Op[..., torch.Tensor]:
        return moe_bf16

    @cached_property
    def _packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        return moe_bf16.pack(self.w13, self.w2)

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_bf16(x, ids, weights, *self._packed)

    def dequantize(self, dtype: torch.dtype) -> DenseExperts:
        return DenseExperts(self.w13.to(dtype), self.w2.to(dtype))

    @staticmethod
    def collect(triples: Iterable[Triple], num_experts: int, dtype: torch.dtype, device: torch.device) -> DenseExperts:
        """Dequantises expert after expert (any format) into two tensors; one expert is held twice at most."""
        stack = Stack(num_experts, device)
        for expert, parts in enumerate(triples):
            stack.put(expert, *(part.dequantize(dtype) for part in parts))
        return DenseExperts(stack.w13, stack.w2)
