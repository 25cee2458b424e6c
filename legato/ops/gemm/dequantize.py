"""Stored weights back to numbers: FP8 in 128x128 blocks, NVFP4 in groups of 16, INT4 in groups of 128.

Owns the byte layouts of the three weight formats. Plain functions, not ops. Every result is the exact float32 product
of code and scale(s), rounded once per multiplication in the order stated. Called by the references in `gemm` and
`experts`, and by `legato.quant`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8_BLOCK = 128
NVFP4_GROUP = 16
INT4_GROUP = 128

#: The eight magnitudes of e2m1 then their negatives: the value of nibble n.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_fp8_block(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """w = float(code) * scale_inv of its 128x128 block.

    weight e4m3 [..., N, K], scale_inv float32 [..., ceil(N/128), ceil(K/128)] (edge blocks may be partial) -> float32
    [..., N, K]. Source: `weight_scale_inv` of the DeepSeek-V3 and GLM FP8 releases; despite the name it multiplies.
    """
    rows, columns = weight.shape[-2:]
    expected = (*weight.shape[:-2], -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(f"scale_inv is {tuple(scale_inv.shape)}, expected {expected} for weight {tuple(weight.shape)}")
    scale = scale_inv.to(torch.float32).repeat_interleave(FP8_BLOCK, -1)[..., :columns]
    scale = scale.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return weight.to(torch.float32) * scale


def dequantize_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """w = (e2m1(nibble) * scale_2) * float(scale of its group of 16)... in the order (value * scale) * scale_2.

    packed uint8 [..., N, K/2] (low nibble = even column; bit 3 the sign), scale e4m3 [..., N, K/16], scale_2 float32,
    either scalars [...] or one per row [..., N] (a fused weight whose parts have different global scales) -> float32
    [..., N, K]. Source: ModelOpt NVFP4 exports; e2m1 of the OCP Microscaling specification 1.0.
    """
    columns = packed.shape[-1] * 2
    expected = (*packed.shape[:-1], columns // NVFP4_GROUP)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale is {tuple(scale.shape)}, expected {expected} for packed {tuple(packed.shape)}")
    values = _e2m1_values(packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    grouped = values[codes.to(torch.int32)].unflatten(-1, (-1, NVFP4_GROUP)) * scale.to(torch.float32).unsqueeze(-1)
    return grouped.flatten(-2) * _global_scale(scale_2, packed)


@cache
def _e2m1_values(device: torch.device) -> Tensor:
    """Kept: made anew it would be a copy from the host, which a captured graph cannot hold."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)


def _global_scale(scale_2: Tensor, packed: Tensor) -> Tensor:
    scale_2 = scale_2.to(torch.float32)
    if scale_2.shape == packed.shape[:-1]:
        return scale_2.unsqueeze(-1)
    if scale_2.numel() == 1 or scale_2.shape == packed.shape[:-2]:
        return scale_2.reshape((*packed.shape[:-2], 1, 1) if scale_2.numel() > 1 else ())
    raise ValueError(f"scale_2 is {tuple(scale_2.shape)}, expected one per matrix or per row of {tuple(packed.shape)}")


def dequantize_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """w = nibble * scale of its group of 128.

    packed uint8 [..., N, K/2] (low nibble = even column, two's complement in [-8, 7]), scale bfloat16 or float32 [...,
    N, K/128] -> float32 [..., N, K]. This is Legato's resident layout; loaders convert other packings to it.
    """
    columns = packed.shape[-1] * 2
    expected = (*packed.shape[:-1], columns // INT4_GROUP)
    if tuple(scale.shape) != expected or columns % INT4_GROUP:
        raise ValueError(f"scale is {tuple(scale.shape)}, expected {expected} for packed {tuple(packed.shape)}")
    signed = packed.view(torch.int8)
    codes = torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1).flatten(-2)
    grouped = codes.to(torch.float32).unflatten(-1, (-1, INT4_GROUP)) * scale.to(torch.float32).unsqueeze(-1)
    return grouped.flatten(-2)
