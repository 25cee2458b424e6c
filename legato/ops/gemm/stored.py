"""Random weights in each storage format, for the cases of `gemm` and `experts`.

Owns nothing but draws; the formats are those of `dequantize.py`. Called by the `CASES` of both folders.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.case import Draw
from legato.ops.gemm.dequantize import FP8_BLOCK, INT4_GROUP, NVFP4_GROUP


def fp8_weight(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., N, K], scale_inv float32) with numbers of about 0.03."""
    scales = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
    return draw.codes(*shape), draw.uniform(*scales, low=0.02, high=0.05)


def nvfp4_weight(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., N, K/2], scale e4m3): every nibble, block scales of 16 to 448, for a small scale_2."""
    packed = draw.integers(*shape[:-1], shape[-1] // 2, low=0, high=256, dtype=torch.uint8)
    scale = draw.uniform(*shape[:-1], shape[-1] // NVFP4_GROUP, low=16.0, high=448.0)
    return packed, scale.to(torch.float8_e4m3fn)


def int4_weight(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., N, K/2], scale bfloat16): every nibble, scales of 0.002 to 0.01."""
    packed = draw.integers(*shape[:-1], shape[-1] // 2, low=0, high=256, dtype=torch.uint8)
    return packed, draw.uniform(*shape[:-1], shape[-1] // INT4_GROUP, low=0.002, high=0.01).to(torch.bfloat16)
