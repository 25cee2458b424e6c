"""NVFP4 weights: e2m1 nibbles, one e4m3 scale per 16 columns, one fp32 scale per tensor, as nvidia/GLM-5.2-NVFP4 stores
them.

Owns `Nvfp4Weight`, `Nvfp4Experts` and the quantiser. Must not know names or files. Activations are never quantised
(`input_scale` is not used): w = e2m1 * scale * scale_2. Byte b of a row holds column 2b in its low nibble and column 2b
+ 1 in its high nibble.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from legato.ops.experts import moe_nvfp4
from legato.ops.gemm import linear_nvfp4
from legato.ops.gemm.dequantize import dequantize_nvfp4
from legato.ops.op import Op
from legato.quant.dense import DenseExperts, Triple
from legato.quant.formats import NVFP4_GROUP, Format
from legato.quant.nibbles import NibbleWeight
from legato.quant.stack import Stack
from legato.quant.weight import ScaleFault, StackedExperts

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9


@dataclass(frozen=True)
class Nvfp4Weight(NibbleWeight):
    """packed u8 [N, K/2], scale e4m3 [N, K/16], scale_2 fp32 [N]: the tensor's scale once per row, so that rows of
    tensors with different scales can be joined exactly."""

    scale_2: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.NVFP4

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.scale_2.nbytes

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear_nvfp4(x, self.packed, self.scale, self.scale_2, residual)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_nvfp4(self.packed, self.scale, self.scale_2).to(dtype)

    def to(self, device: torch.device) -> Nvfp4Weight:
        return Nvfp4Weight(self.packed.to(device), self.scale.to(device), self.scale_2.to(device))

    def fault(self) -> ScaleFault | None:
        if not bool((torch.isfinite(self.scale_2) & (self.scale_2 > 0)).all()):
            return ScaleFault("scale_2", str(float(self.scale_2[0])))
        bits = self.scale.view(torch.uint8)
        for word, damaged in (("NaN", (bits & 0x7F) == 0x7F), ("a negative scale", bits > 0x80)):
            if bool(damaged.any()):
                return ScaleFault("scale", f"{word} at {damaged.nonzero()[0].tolist()}")
        return None


@dataclass(frozen=True)
class Nvfp4Experts(StackedExperts):
    """w13 u8 [E, 2F, D/2], w13_scale e4m3 [E, 2F, D/16], w13_scale_2 fp32 [E, 2] (gate, up), w2 u8 [E, D, F/2],
    w2_scale e4m3 [E, D, F/16], w2_scale_2 fp32 [E]. Gate and up keep their own global scales."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_scale_2: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_scale_2: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.NVFP4

    @property
    def op(self) -> Op[..., torch.Tensor]:
        return moe_nvfp4

    def dequantize(self, dtype: torch.dtype) -> DenseExperts:
        rows_13 = self.w13_scale_2.repeat_interleave(self.w13.shape[1] // 2, dim=1)
        rows_2 = self.w2_scale_2[:, None].expand(-1, self.w2.shape[1])
        w13 = dequantize_nvfp4(self.w13, self.w13_scale, rows_13).to(dtype)
        return DenseExperts(w13, dequantize_nvfp4(self.w2, self.w2_scale, rows_2).to(dtype))

    @staticmethod
    def collect(triples: Iterable[Triple], num_experts: int, device: torch.device) -> Nvfp4Experts:
        """Stacks experts that are all `Nvfp4Weight`, each with one global scale."""
        codes, scales = Stack(num_experts, device), Stack(num_experts, device)
        w13_scale_2 = torch.empty(num_experts, 2, dtype=torch.float32, device=device)
        w2_scale_2 = torch.empty(num_experts, dtype=torch.float32, device=device)
        for expert, (gate, up, down) in enumerate(triples):
            if not (isinstance(gate, Nvfp4Weight) and isinstance(up, Nvfp4Weight) and isinstance(down, Nvfp4Weight)):
                raise TypeError("Nvfp4Experts.collect takes Nvfp4Weight only")
            codes.put(expert, gate.packed, up.packed, down.packed)
            scales.put(expert, gate.scale, up.scale, down.scale)
            w13_scale_2[expert, 0], w13_scale_2[expert, 1] = gate.scale_2[0], up.scale_2[0]
            w2_scale_2[expert] = down.scale_2[0]
        return Nvfp4Experts(codes.w13, scales.w13, w13_scale_2, codes.w2, scales.w2, w2_scale_2)


def quantize_nvfp4(weight: torch.Tensor) -> Nvfp4Weight:
    """Quantises float [N, K], K a multiple of 16: scale_2 = amax / (6 * 448), block scale = e4m3(block amax / 6 /
    scale_2), values to the nearest e2m1, ties to the even code.

    A block whose scale underflows e4m3 gets the smallest one; an all-zero tensor gets scale_2 = 1.
    Source of the convention: NVIDIA ModelOpt's NVFP4 recipe (global scale amax / (6 * 448)).
    """
    rows, columns = weight.shape
    if columns % NVFP4_GROUP:
        raise ValueError(f"NVFP4 needs a multiple of {NVFP4_GROUP} columns, got {columns}")
    groups = weight.float().reshape(rows, columns // NVFP4_GROUP, NVFP4_GROUP)
    amax = groups.abs().amax()
    scale_2 = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    block = groups.abs().amax(-1) / E2M1_MAX / scale_2
    scale = block.clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = round_e2m1(groups / (scale.float() * scale_2)[..., None]).reshape(rows, columns)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return Nvfp4Weight(packed, scale, scale_2.expand(rows).contiguous())


def round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code (u8, sign in bit 3) of fp32 values; ties go to the even code, magnitudes above 6 saturate.

    Code m stands for {0, .5, 1, 1.5, 2, 3, 4, 6}; a tie lies on a midpoint and rounds down where the lower code is
    even.
    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for lower, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = magnitude > middle if lower % 2 == 0 else magnitude >= middle
        code += above.to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)
