"""From the parts of a checkpoint to resident weights, and back: the only place that pairs suffixes with classes.

Owns `build` (parts -> Weight), `spell` (Weight -> parts) and `collect` (experts -> Experts). Must not know names before
the suffix. Called by the loader and the quantiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from legato.quant.dense import DenseExperts, DenseWeight, Triple
from legato.quant.formats import BLOCK, Format
from legato.quant.fp8_block import Fp8BlockExperts, Fp8BlockWeight
from legato.quant.int4 import Int4Experts, Int4Weight, from_compressed_tensors, from_w4afp8, to_compressed_tensors
from legato.quant.nvfp4 import Nvfp4Experts, Nvfp4Weight
from legato.quant.weight import Experts, Weight


def build(stored: Format, parts: Mapping[str, torch.Tensor]) -> Weight:
    """The weight behind the parts `{suffix: tensor}`, which have been checked against `legato.quant.formats.parts`."""
    if stored is Format.DENSE:
        return DenseWeight(parts["weight"])
    if stored is Format.FP8_BLOCK:
        scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
        return Fp8BlockWeight(parts["weight"], scale.float())
    if stored is Format.NVFP4:
        rows = parts["weight"].shape[0]
        return Nvfp4Weight(parts["weight"], parts["weight_scale"], parts["weight_scale_2"].reshape(1).repeat(rows))
    if stored is Format.INT4_PACKED:
        return from_compressed_tensors(parts["weight_packed"], _int4_scale(parts["weight_scale"]))
    return from_w4afp8(parts["weight"], _int4_scale(parts["weight_scale_inv"]))


def spell(weight: Weight, layout: Format) -> dict[str, torch.Tensor]:
    """The parts `{suffix: tensor}` of a weight in a checkpoint layout: the inverse of `build`."""
    if isinstance(weight, DenseWeight) and layout is Format.DENSE:
        return {"weight": weight.tensor}
    if isinstance(weight, Fp8BlockWeight) and layout is Format.FP8_BLOCK:
        return {"weight": weight.weight, "weight_scale_inv": weight.scale_inv}
    if isinstance(weight, Nvfp4Weight) and layout is Format.NVFP4:
        scale_2 = weight.scale_2[0].clone()
        return {"weight": weight.packed, "weight_scale": weight.scale, "weight_scale_2": scale_2}
    if isinstance(weight, Int4Weight) and layout is Format.INT4_PACKED:
        shape = torch.tensor([weight.out_features, weight.in_features], dtype=torch.int64)
        return {"weight_packed": to_compressed_tensors(weight), "weight_scale": weight.scale, "weight_shape": shape}
    if isinstance(weight, Int4Weight) and layout is Format.INT4_NIBBLES:
        return {"weight": weight.packed.view(torch.int8), "weight_scale_inv": weight.scale}
    raise TypeError(f"a weight in format {weight.format.value} has no layout {layout.value}")


def stackable(stored: Iterable[Format], width: int) -> bool:
    """True where experts of these formats and this width F can stay as stored: one format, FP8 blocks not straddling
    gate and up."""
    formats = {Format.INT4_NIBBLES if entry is Format.INT4_PACKED else entry for entry in stored}
    return len(formats) == 1 and (formats != {Format.FP8_BLOCK} or width % BLOCK == 0)


def collect(
    stored: Format, triples: Iterable[Triple], num_experts: int, dtype: torch.dtype, device: torch.device
) -> Experts:
    """Stacks the experts of one layer in the format they share (see `stackable`); dense ones in `dtype`."""
    if stored is Format.FP8_BLOCK:
        return Fp8BlockExperts.collect(triples, num_experts, device)
    if stored is Format.NVFP4:
        return Nvfp4Experts.collect(triples, num_experts, device)
    if stored in (Format.INT4_PACKED, Format.INT4_NIBBLES):
        return Int4Experts.collect(triples, num_experts, device)
    return DenseExperts.collect(triples, num_experts, dtype, device)


def _int4_scale(scale: torch.Tensor) -> torch.Tensor:
    """fp16 scales become fp32, which holds them exactly; bf16 and fp32 stay."""
    return scale.float() if scale.dtype == torch.float16 else scale
