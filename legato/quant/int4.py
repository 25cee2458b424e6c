"""INT4 weights in groups of 128 columns, symmetric, from either of two public checkpoint layouts.

Owns `Int4Weight`, `Int4Experts`, the quantiser and the (un)packing of both layouts. Must not know names or files. w = q
* scale with q in [-8, 7]. Resident layout: two's-complement nibbles, the even column in the low nibble.

No INT4 release of GLM-5.2 was at hand. Assumed layouts: (a) compressed-tensors "pack-quantized": int32 [N, K/8],
eight nibbles per word, lowest bits first, offset binary (q = nibble - 8), as `pack_to_int32` of compressed-tensors
0.20 writes it; (b) w4afp8: int8 [N, K/2], the even column in the low nibble, two's complement, as TensorRT-LLM's
`pack_int8_tensor_to_packed_int4` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from legato.ops.experts import moe_int4
from legato.ops.gemm import linear_int4
from legato.ops.gemm.dequantize import dequantize_int4
from legato.ops.op import Op
from legato.quant.dense import DenseExperts, Triple
from legato.quant.formats import BLOCK, Format
from legato.quant.nibbles import NibbleWeight
from legato.quant.scales import float_fault, zero_fault
from legato.quant.stack import Stack
from legato.quant.weight import ScaleFault, StackedExperts


@dataclass(frozen=True)
class Int4Weight(NibbleWeight):
    """packed u8 [N, K/2], scale bf16 or fp32 [N, K/128]."""

    @property
    def format(self) -> Format:
        return Format.INT4_NIBBLES

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear_int4(x, self.packed, self.scale, residual)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_int4(self.packed, self.scale).to(dtype)

    def to(self, device: torch.device) -> Int4Weight:
        return Int4Weight(self.packed.to(device), self.scale.to(device))

    def fault(self) -> ScaleFault | None:
        found = float_fault(self.scale)
        if found is None and bool((self.scale == 0).any()):
            found = zero_fault(self.scale, self.packed.reshape(self.out_features, -1, BLOCK // 2).amax(-1))
        return None if found is None else ScaleFault("scale", found)


@dataclass(frozen=True)
class Int4Experts(StackedExperts):
    """w13 u8 [E, 2F, D/2], w13_scale [E, 2F, D/128], w2 u8 [E, D, F/2], w2_scale [E, D, F/128]."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.INT4_NIBBLES

    @property
    def op(self) -> Op[..., torch.Tensor]:
        return moe_int4

    def dequantize(self, dtype: torch.dtype) -> DenseExperts:
        w13 = dequantize_int4(self.w13, self.w13_scale).to(dtype)
        return DenseExperts(w13, dequantize_int4(self.w2, self.w2_scale).to(dtype))

    @staticmethod
    def collect(triples: Iterable[Triple], num_experts: int, device: torch.device) -> Int4Experts:
        """Stacks experts that are all `Int4Weight`."""
        codes, scales = Stack(num_experts, device), Stack(num_experts, device)
        for expert, (gate, up, down) in enumerate(triples):
            if not (isinstance(gate, Int4Weight) and isinstance(up, Int4Weight) and isinstance(down, Int4Weight)):
                raise TypeError("Int4Experts.collect takes Int4Weight only")
            codes.put(expert, gate.packed, up.packed, down.packed)
            scales.put(expert, gate.scale, up.scale, down.scale)
        return Int4Experts(codes.w13, scales.w13, codes.w2, scales.w2)


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """Quantises float [N, K], K a multiple of 128: scale = group amax / 7 rounded to bf16 (1 where the group is all
    zero), q = round-half-even(w / scale) clamped to [-8, 7]."""
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"INT4 needs a multiple of {BLOCK} columns, got {columns}")
    groups = weight.float().reshape(rows, columns // BLOCK, BLOCK)
    amax = groups.abs().amax(-1)
    scale = torch.where(amax > 0, amax / 7.0, torch.ones_like(amax)).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
    return Int4Weight(_join(codes.reshape(rows, columns)), scale)


def from_compressed_tensors(weight_packed: torch.Tensor, scale: torch.Tensor) -> Int4Weight:
    """Layout (a) -> resident. weight_packed int32 [N, K/8], nibble i of a word (bits 4i..4i+3) is column 8w + i, q =
    nibble - 8."""
    octets = weight_packed.contiguous().view(torch.uint8)
    return Int4Weight(octets ^ 0x88, scale)


def to_compressed_tensors(weight: Int4Weight) -> torch.Tensor:
    """Resident -> the int32 [N, K/8] of layout (a)."""
    return (weight.packed ^ 0x88).view(torch.int32)


def from_w4afp8(weight: torch.Tensor, scale: torch.Tensor) -> Int4Weight:
    """Layout (b) -> resident: the same nibbles, int8 read as u8."""
    return Int4Weight(weight.view(torch.uint8), scale)


def _join(codes: torch.Tensor) -> torch.Tensor:
    nibbles = codes.view(torch.uint8) & 0x0F
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
