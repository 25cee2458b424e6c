# pyright: basic
"""Experts' weights in the order in which `sm90_moe.cu` reads them: one step after the other, scales inside.

Owns the layouts (their meaning is in `sm90_formats.cuh`). Must not know launches. Called by `sm90.py`, once per weight at
load. Plain PyTorch on whatever device the weight is; a few experts at a time, since codes take eight times their room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Outputs of a tile; K of a step; bytes of a step.
OUTPUTS = 16
STEP_K = {"bf16": 64, "fp8": 128, "int4": 128, "nvfp4": 128}
STEP_BYTES = {"bf16": 2048, "fp8": 2064, "int4": 1056, "nvfp4": 1152}
#: What the kernel's sums of an NVFP4 weight lack besides its global scale.
NVFP4_FACTOR = 256.0
#: Elements packed at once.
_AT_ONCE = 1 << 25


def form_of(packed: Tensor) -> str | None:
    """The format of packed weights that have no factors outside: by the bytes of a step. None for others."""
    if packed.dtype is not torch.uint8 or packed.dim() != 4:
        return None
    return next(form for form, size in STEP_BYTES.items() if size == packed.shape[-1])


def together(w13: Tensor, group: int = 8) -> Tensor:
    """[E, 2F, ...] (gate rows, then up rows) as tiles of eight gate rows and their eight up rows, of the same shape; for
    what there is one of per eight rows, `group` is 1."""
    experts, double = w13.shape[:2]
    tiles = w13.reshape(experts, 2, double // 2 // group, group, *w13.shape[2:])
    return tiles.transpose(1, 2).reshape(w13.shape)


def by_experts(pack: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """`pack` of a few experts at a time; every part has the experts first."""
    experts = parts[0].shape[0]
    at_once = max(1, _AT_ONCE // max(1, parts[0][0].numel()))
    made: Tensor | None = None
    for first in range(0, experts, at_once):
        some = pack(*(part[first : first + at_once] for part in parts))
        if made is None:
            made = some.new_empty(experts, *some.shape[1:])
        made[first : first + at_once] = some
    assert made is not None
    return made


def pack_bf16(weight: Tensor) -> Tensor:
    """bfloat16 [E, N, K] -> uint8 [E, N/16, K/64, 2048]."""
    experts, outputs, inputs = weight.shape
    blocks = weight.view(experts, outputs // 16, 2, 8, inputs // 64, 4, 2, 8)  # half, g, block, t, piece, column
    packed = blocks.permute(0, 1, 4, 2, 6, 3, 5, 7).contiguous()
    return packed.view(experts, outputs // 16, inputs // 64, -1).view(torch.uint8)


def pack_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [E, N, K] and the scale of every eight outputs by 128 of K, float32 [E, N/8, K/128] -> uint8 [E, N/16, K/128,
    2064]."""
    experts, outputs, inputs = weight.shape
    strips, steps = outputs // 16, inputs // 128
    # half, g, step, block, t, word, pair, element
    codes = weight.view(torch.uint8).view(experts, strips, 2, 8, steps, 2, 4, 4, 2, 2).to(torch.int64)
    low, high = codes[..., 0, 0], codes[..., 0, 1]
    first = _spread_e4m3(low) | _spread_e4m3(high) << 16
    low, high = codes[..., 1, 0], codes[..., 1, 1]
    second = _spread_e4m3(low) | _spread_e4m3(high) << 16
    words = first | _rotate(second & 0x87808780, 4) | (second & 0x00700070) >> 4
    packed = _bytes(words.permute(0, 1, 4, 5, 2, 3, 6, 7).reshape(experts, strips, steps, -1))
    factors = scales.view(experts, strips, 2, steps).transpose(2, 3).contiguous().view(torch.uint8)
    return torch.cat((packed, factors, torch.zeros_like(factors)), dim=-1)


def pack_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [E, N, K/2] (low nibble = even column, two's complement) and bfloat16 [E, N, K/128] -> uint8 [E, N/16, K/128,
    1056]."""
    experts, outputs, half = packed.shape
    strips, steps = outputs // 16, half // 64
    # half, g, step, block, t, word, pair
    octets = (packed ^ 0x88).view(experts, strips, 2, 8, steps, 2, 4, 2, 4).to(torch.int64)
    pairs = (octets & 15) | (octets >> 4) << 16
    words = pairs[..., 0] | pairs[..., 1] << 4 | pairs[..., 2] << 8 | pairs[..., 3] << 12
    codes = _bytes(words.permute(0, 1, 4, 5, 3, 6, 2, 7).reshape(experts, strips, steps, -1))
    scales = scale.view(experts, strips, 2, 8, steps).permute(0, 1, 4, 3, 2).contiguous()
    return torch.cat((codes, scales.view(experts, strips, steps, 16).view(torch.uint8)), dim=-1)


def pack_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [E, N, K/2] (low nibble = even column) and e4m3 [E, N, K/16] -> uint8 [E, N/16, K/128, 1152].

    A group whose scale is zero becomes a group of zeros under another scale.
    """
    experts, outputs, half = packed.shape
    strips, steps = outputs // 16, half // 64
    mantissa, exponent = torch.frexp(scale.to(torch.float32))
    dead = scale.to(torch.float32) == 0
    coded = torch.where(dead, 160, (exponent + 20) * 8 + (mantissa * 16 - 8).to(torch.int32)).to(torch.uint8)
    octets = torch.where(dead.repeat_interleave(8, dim=-1), 0, packed)
    # half, g, step, block, t, pair
    octets = octets.view(experts, strips, 2, 8, steps, 2, 4, 8).to(torch.int64)
    pairs = _spread_e2m1(octets & 15) | _spread_e2m1(octets >> 4) << 16
    both = _rotate(pairs[..., 6], -8) | _rotate(pairs[..., 7], -14)
    first = pairs[..., 0] | _rotate(pairs[..., 1], -4) | _rotate(pairs[..., 2], -10) | (both & 0x06030603)
    second = sum(_rotate(pairs[..., 3 + i], -turn) for i, turn in enumerate((2, 6, 12))) | (both & 0xF9FCF9FC)
    words = torch.stack((first, second), dim=-1)  # [E, strips, half, g, step, block, t, word]
    codes = _bytes(words.permute(0, 1, 4, 5, 3, 6, 2, 7).reshape(experts, strips, steps, -1))
    scales = coded.view(experts, strips, 2, 8, steps, 2, 4).permute(0, 1, 4, 3, 6, 5, 2)
    return torch.cat((codes, scales.reshape(experts, strips, steps, -1)), dim=-1)


def _spread_e2m1(code: Tensor) -> Tensor:
    """A nibble where the kernel wants it in bfloat16: sign at bit 15, exponent and mantissa at 8 to 6."""
    return (code & 7) << 6 | (code >> 3) << 15


def _spread_e4m3(code: Tensor) -> Tensor:
    """A byte where the kernel wants it in bfloat16: sign at bit 15, exponent and mantissa at 10 to 4."""
    return (code & 127) << 4 | (code >> 7) << 15


def _rotate(word: Tensor, left: int) -> Tensor:
    """32-bit words in int64, rotated."""
    left %= 32
    return (word << left | word >> 32 - left) & 0xFFFFFFFF


def _bytes(words: Tensor) -> Tensor:
    """32-bit words in int64 -> their bytes, the last dimension four times as long."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.uint8)
