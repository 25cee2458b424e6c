"""FP8 weights with one fp32 scale per 128 x 128 block, as zai-org/GLM-5.2-FP8 stores them.

Owns `Fp8BlockWeight`, `Fp8BlockExperts` and the quantiser. Must not know names or files. w = e4m3 * scale_inv (it
multiplies).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from legato.ops.experts import moe_fp8_block
from legato.ops.gemm import linear_fp8_block, linear_fp8_block_best, linear_fp8_block_normed
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.op import REFERENCE, Op
from legato.ops.pointwise import swiglu
from legato.ops.sample import greedy_keys
from legato.quant.dense import DenseExperts, Triple
from legato.quant.formats import BLOCK, Format
from legato.quant.scales import float_fault, zero_fault
from legato.quant.stack import Stack
from legato.quant.weight import ScaleFault, StackedExperts

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Fp8BlockWeight:
    """weight e4m3 [N, K], scale_inv fp32 [ceil(N/128), ceil(K/128)]; the last blocks may be partial."""

    weight: torch.Tensor
    scale_inv: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.FP8_BLOCK

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale_inv.nbytes

    @cached_property
    def _packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As the bound implementation wants them; the tensors themselves where that does not care."""
        return linear_fp8_block.pack(self.weight, self.scale_inv)

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear_fp8_block(x, *self._packed, residual)

    def linear_normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return linear_fp8_block_normed(x, norm, eps, *self._packed)

    def linear_swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(self.linear(x))

    def best_keys(self, x: torch.Tensor, first: int, width: int) -> torch.Tensor:
        if linear_fp8_block_best.bound.target == REFERENCE:  # then the choice behind the product is faster
            return greedy_keys(self.linear(x)[:, :width], first)
        return linear_fp8_block_best(x, *self._packed, first, width)[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_fp8_block(self.weight, self.scale_inv).to(dtype)

    def to(self, device: torch.device) -> Fp8BlockWeight:
        return Fp8BlockWeight(self.weight.to(device), self.scale_inv.to(device))

    def fault(self) -> ScaleFault | None:
        found = float_fault(self.scale_inv)
        if found is None and bool((self.scale_inv == 0).any()):
            found = zero_fault(self.scale_inv, _blocks(self.weight.float()).abs().amax((1, 3)))
        return None if found is None else ScaleFault("scale_inv", found)


@dataclass(frozen=True)
class Fp8BlockExperts(StackedExperts):
    """w13 e4m3 [E, 2F, D] with scales [E, 2F/128, ceil(D/128)], w2 e4m3 [E, D, F] with scales; F is a multiple of
    128."""

    w13: torch.Tensor
    w13_scale_inv: torch.Tensor
    w2: torch.Tensor
    w2_scale_inv: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.FP8_BLOCK

    @property
    def op(self) -> Op[..., torch.Tensor]:
        return moe_fp8_block

    def dequantize(self, dtype: torch.dtype) -> DenseExperts:
        w13 = dequantize_fp8_block(self.w13, self.w13_scale_inv).to(dtype)
        return DenseExperts(w13, dequantize_fp8_block(self.w2, self.w2_scale_inv).to(dtype))

    @staticmethod
    def collect(triples: Iterable[Triple], num_experts: int, device: torch.device) -> Fp8BlockExperts:
        """Stacks experts that are all `Fp8BlockWeight` with F a multiple of 128 (gate and up blocks then stay
        whole)."""
        codes, scales = Stack(num_experts, device), Stack(num_experts, device)
        for expert, (gate, up, down) in enumerate(triples):
            if not (
                isinstance(gate, Fp8BlockWeight) and isinstance(up, Fp8BlockWeight) and isinstance(down, Fp8BlockWeight)
            ):
                raise TypeError("Fp8BlockExperts.collect takes Fp8BlockWeight only")
            if gate.out_features % BLOCK:
                raise ValueError(f"the expert width must be a multiple of {BLOCK}, got {gate.out_features}")
            codes.put(expert, gate.weight, up.weight, down.weight)
            scales.put(expert, gate.scale_inv, up.scale_inv, down.scale_inv)
        return Fp8BlockExperts(codes.w13, scales.w13, codes.w2, scales.w2)


def quantize_fp8_block(weight: torch.Tensor) -> Fp8BlockWeight:
    """Quantises float [N, K]: scale_inv = amax / 448 per block (1 where the block is all zero), e4m3 =
    round-to-nearest-even."""
    rows, columns = weight.shape
    blocks = _blocks(weight.float())
    amax = blocks.abs().amax((1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    codes = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.reshape(scale.shape[0] * BLOCK, scale.shape[1] * BLOCK)[:rows, :columns]
    return Fp8BlockWeight(codes.contiguous(), scale)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """[N, K] padded with zeros -> [ceil(N/128), 128, ceil(K/128), 128]."""
    rows, columns = values.shape
    padded = functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
