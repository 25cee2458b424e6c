"""Rows that break selection kernels: ties, signed zeros, infinities, NaN, subnormals, order, narrow and huge ranges.

Owns their draw. Knows nothing of how they are selected. Called by the cases of `select` and by its tests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from legato.ops.case import Draw


def _bits(low: int, high: int, draw: Draw, width: int) -> Tensor:
    """Floats of random bits in [low, high)."""
    drawn = draw.integers(width, low=low, high=high, dtype=torch.int64)
    return drawn.to(torch.int32).view(torch.float32)


def adversarial_rows(draw: Draw, width: int) -> dict[str, Tensor]:
    """One row [L] of every kind."""
    normal = draw.normal(width)
    place = torch.arange(width, device=draw.device)
    zero = torch.zeros_like(normal)
    infinite = draw.normal(width)
    infinite[::5], infinite[1::7] = math.inf, -math.inf
    few = draw.normal(width).abs()
    few[100:] = 0.0
    local = draw.normal(width)
    local[-min(width, 3000) :] += 4.0
    return {
        "normal": normal,
        "equal": torch.full_like(normal, 1.5),
        "zero": zero,
        "signed zeros": torch.where(place % 3 == 0, -0.0, zero),
        "rectified": (draw.normal(width) - 1.9).relu(),
        "few positive": few,
        "two values": (draw.uniform(width) < 0.5).to(torch.float32),
        "coarse": (draw.normal(width) * 4).round() / 4,
        "subnormal": _bits(0, 1 << 23, draw, width),
        "infinities": infinite,
        "beyond float16": draw.normal(width) * 1e6 + 2e5,
        "huge": draw.normal(width) * 1e38,
        "narrow": _bits(0x477FE000, 0x477FE000 + 2000, draw, width),
        "ascending": place.to(torch.float32),
        "descending": -place.to(torch.float32),
        "some NaN": torch.where(draw.uniform(width) < 0.3, math.nan, draw.normal(width)),
        "all NaN": torch.full_like(normal, math.nan),
        "any bits": _bits(-(1 << 31), 1 << 31, draw, width),
        "negative": -draw.normal(width).abs() - 1,
        "high at the end": local,
    }
