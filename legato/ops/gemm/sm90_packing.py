# pyright: basic
"""Weights in the order in which `sm90_linear.cu` reads them, and back.

Owns the layout. Must not know launches. Called by `sm90.py`, once per weight at load; plain PyTorch on whatever device it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.ops.gemm.sm90_tiling import STRIP, Tiling


@dataclass(frozen=True)
class Kept:
    """A weight for few rows, `packed` in the kernel's order, and for many, as it is `stored`: bringing it back would cost a pass
    over it at every call."""

    packed: Tensor
    stored: Tensor

    @property
    def nbytes(self) -> int:
        """Of what a call of few rows reads."""
        return self.packed.nbytes


def stored_of(weight: Tensor | Kept) -> Tensor:
    """The weight as it is stored, of one that may be kept in the kernel's order too."""
    return weight.stored if isinstance(weight, Kept) else weight


def arrange(weight: Tensor, cut: Tiling) -> Tensor:
    """A weight [N, K] (16 divides N, a block's K divides K) in the order in which the kernel reads it.

    A block of 1 KB is 16 outputs by 64 bytes of K, in two halves of 16 bytes for each lane (lane = 4 * output + piece). e4m3: the
    first half has the pieces of outputs 0..7, the second those of 8..15. bfloat16: a half is what one `mma` wants, two pairs of K
    of an output and of the eighth after it in turn. A group of `cut.strips` strips is K-major: all its strips of one block of K,
    then the next block; the last group may have fewer. The result's shape [N/16, blocks, 2, 32, 16 bytes] says how much
    there is, not where it lies.
    """
    outputs, inputs = weight.shape
    piece = 128 // cut.bits
    total, k_blocks = outputs // STRIP, inputs // cut.block_k
    if cut.bits == 16:  # [strip, 8s of outputs, output, block, piece, half, pair of K, 2]
        parted = weight.view(total, 2, 8, k_blocks, 4, 2, 2, 2).permute(0, 3, 5, 2, 4, 6, 1, 7)
    else:
        parted = weight.view(total, 2, 8, k_blocks, 4, piece).permute(0, 3, 1, 2, 4, 5)
    blocks = parted.reshape(total, k_blocks, -1)
    whole = total // cut.strips * cut.strips
    parts = [blocks[:whole].unflatten(0, (-1, cut.strips)).transpose(1, 2).flatten()] if whole else []
    if whole < total:
        parts.append(blocks[whole:].transpose(0, 1).flatten())
    return torch.cat(parts).view(total, k_blocks, 2, 32, piece)


def restore(packed: Tensor, cut: Tiling) -> Tensor:
    """The weight [N, K] that `arrange` was given."""
    total, k_blocks, _, _, piece = packed.shape
    whole = total // cut.strips * cut.strips
    flat = packed.reshape(total * k_blocks, -1)
    parts = [flat[: whole * k_blocks].view(-1, k_blocks, cut.strips, flat.shape[1]).transpose(1, 2).flatten(0, 1)]
    if whole < total:
        parts.append(flat[whole * k_blocks :].view(k_blocks, total - whole, -1).transpose(0, 1))
    flat = torch.cat(parts)
    if cut.bits == 16:
        parted = flat.view(total, k_blocks, 2, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 4, 2, 5, 7)
    else:
        parted = flat.view(total, k_blocks, 2, 8, 4, piece).permute(0, 2, 3, 1, 4, 5)
    return parted.reshape(total * STRIP, k_blocks * 4 * piece)


def in_turn(gate_up: Tensor) -> Tensor:
    """[2F, K] (gate rows, then up rows) with rows in fours, of the gate and of the up in turn."""
    return gate_up.view(2, -1, 4, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def restore_swiglu(packed: Tensor, cut: Tiling) -> Tensor:
    """The weight [2F, K] that `pack_swiglu` was given."""
    rows = restore(packed, cut)
    return rows.view(-1, 2, 4, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def interleaved(codes: Tensor) -> Tensor:
    """Four e4m3 of K in turn as one word of two pairs, so that widening takes few instructions: of each half, sign at bit 15,
    exponent and mantissa of the first pair from bit 10 down; where these leave room, the second pair's exponents and signs
    rotated left by four, their mantissas right."""
    words = codes.reshape(-1, 4).to(torch.int32)
    spread = (words & 127) << 4 | (words >> 7) << 15
    first, second = (spread[:, place] | spread[:, place + 1] << 16 for place in (0, 2))
    word = first | (second & 0x07800780) << 4 | (second & 0x8000) << 4 | (second >> 28) & 8 | (second >> 4) & 0x00070007
    return word.view(torch.uint8).view(codes.shape)


def separated(codes: Tensor) -> Tensor:
    """What `interleaved` was given."""
    word = codes.reshape(-1, 4).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    first = word & 0x87F087F0
    second = (word >> 4 | word << 28) & 0x87808780 | word << 4 & 0x00700070
    halves = torch.stack((first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16), dim=-1)
    return ((halves >> 4) & 127 | (halves >> 15) << 7).to(torch.uint8).view(codes.shape)
