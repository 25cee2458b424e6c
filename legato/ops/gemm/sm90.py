# pyright: basic
"""Products of 1 to 16 rows with a weight on Hopper, at the speed of memory: `sm90_linear.cu`, in bfloat16 and in FP8.

Owns the order of a packed weight and the launch. Must not know layers; how shapes are cut is in `sm90_tiling.py`.
Imported by `bind` only. A row's bits depend on nothing but that row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.build import Kernel, Launch, Source
from legato.ops.gemm import linear_bf16, linear_fp8_block
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.gemm.sm90_tiling import STRIP, WARPS, Tiling, tiling

_SOURCE = Path(__file__).with_name("sm90_linear.cu")


@cache
def kernel(cut: Tiling, tiles: int) -> tuple[Kernel, int]:
    """The kernel of a tiling for `tiles` tiles of 8 rows, and its dynamic shared memory."""
    shared = cut.shared_bytes(tiles)
    return Kernel(Source(_SOURCE, cut.macros(tiles)), "linear", shared_bytes=shared), shared


def arrange(weight: Tensor, cut: Tiling) -> Tensor:
    """A weight [N, K] (16 divides N, a block's K divides K) in the order in which the kernel reads it.

    A block of 1 KB is 16 outputs by 64 bytes of K: first the 16-byte pieces of outputs 0..7, lane by lane (lane = 4 *
    output + piece), then those of 8..15. A group of `cut.strips` strips is K-major: all its strips of one block of K,
    then the next block; the last group may have fewer. The result's shape [N/16, blocks, 2, 32, 16 bytes] says how much
    there is, not where it lies.
    """
    outputs, inputs = weight.shape
    piece = 128 // cut.bits
    total, k_blocks = outputs // STRIP, inputs // cut.block_k
    blocks = weight.view(total, 2, 8, k_blocks, 4, piece).permute(0, 3, 1, 2, 4, 5).reshape(total, k_blocks, -1)
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
    blocks = torch.cat(parts).view(total, k_blocks, 2, 8, 4, piece)
    return blocks.permute(0, 2, 3, 1, 4, 5).reshape(total * STRIP, k_blocks * 4 * piece)


def multiply(
    cut: Tiling, x: Tensor, packed: Tensor, residual: Tensor | None, scale_inv: Tensor | None = None
) -> Tensor:
    """One launch: x [T, K] bfloat16 (1 to 16 rows, each aligned to 16 bytes) with a weight that `arrange` made."""
    rows, outputs = x.shape[0], packed.shape[0] * STRIP
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    compiled, shared = kernel(cut, 1 if rows <= 8 else 2)
    groups = -(-packed.shape[0] // cut.strips)
    how = Launch(
        grid=(groups * cut.ranks,),
        block=(32 * WARPS,),
        cluster=(cut.ranks,) if cut.ranks > 1 else None,
        shared_bytes=shared,
        programmatic=True,
    )
    scales = () if scale_inv is None else (scale_inv, scale_inv.shape[1])
    compiled(how, packed, x, residual, y, rows, outputs, packed.shape[1], x.stride(0), outputs, *scales)
    return y


def _cut_of(packed: Tensor, bits: int) -> Tiling:
    """The tiling that `arrange` was given for this weight."""
    found = tiling(packed.shape[0] * STRIP, packed.shape[1] * 512 // bits, bits)
    if found is None:
        raise ValueError(f"no tiling is recorded for a packed weight {tuple(packed.shape)} of {bits} bits")
    return found


def _rows(x: Tensor) -> Tensor:
    """`x` with rows that bulk copies and 16-byte loads can read."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _residual(residual: Tensor | None) -> Tensor | None:
    """The residual as the kernel reads it: contiguous bfloat16, four numbers at a time."""
    if residual is None or (residual.is_contiguous() and residual.data_ptr() % 8 == 0):
        return residual
    return residual.clone(memory_format=torch.contiguous_format)


def _is_bf16(x: Tensor, residual: Tensor | None) -> bool:
    return x.dtype is torch.bfloat16 and (residual is None or residual.dtype is torch.bfloat16)


def _by_library(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    product = functional.linear(x, weight)
    return product if residual is None else product + residual


def pack_bf16(weight: Tensor) -> Tensor:
    """A bfloat16 weight in the kernel's order; unchanged where its type is another or its shape is not recorded."""
    found = tiling(*weight.shape, 16) if weight.dtype is torch.bfloat16 else None
    return weight if found is None else arrange(weight, found)


@linear_bf16.on("sm90", pack=pack_bf16)
def run_bf16(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Up to 16 (for some shapes 8) rows of bfloat16 with a packed weight: the kernel.

    More rows: cuBLAS on the restored weight, which costs one more pass over it. A weight that `pack` left unchanged:
    cuBLAS, or the reference in float32.
    """
    if weight.dim() != 5:
        if weight.dtype is torch.bfloat16 and _is_bf16(x, residual):
            return _by_library(x, weight, residual)
        return linear_bf16.reference(x, weight, residual)
    cut = _cut_of(weight, 16)
    if not _is_bf16(x, residual):
        return linear_bf16.reference(x, restore(weight, cut), residual)
    if not 0 < x.shape[0] <= cut.most_rows:
        return _by_library(x, restore(weight, cut), residual)
    return multiply(cut, _rows(x), weight, _residual(residual))


def pack_fp8(weight: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3 weight in the kernel's order, and its scales; unchanged where its shape is not recorded."""
    found = tiling(*weight.shape, 8)
    if found is None:
        return weight, scale_inv
    return arrange(weight.view(torch.uint8), found).view(torch.float8_e4m3fn), scale_inv.contiguous()


@linear_fp8_block.on("sm90", pack=pack_fp8)
def run_fp8(x: Tensor, weight: Tensor, scale_inv: Tensor, residual: Tensor | None = None) -> Tensor:
    """Up to 16 rows of bfloat16 with a packed weight: the kernel, whose products are exact and whose scales multiply
    sums over 64 of K.

    Otherwise the weight is dequantised to bfloat16 for cuBLAS, or to float32 for the reference.
    """
    if weight.dim() == 5:
        cut = _cut_of(weight, 8)
        if _is_bf16(x, residual) and 0 < x.shape[0] <= cut.most_rows:
            return multiply(cut, _rows(x), weight, _residual(residual), scale_inv)
        weight = restore(weight.view(torch.uint8), cut).view(torch.float8_e4m3fn)
    if not _is_bf16(x, residual):
        return linear_fp8_block.reference(x, weight, scale_inv, residual)
    return _by_library(x, dequantize_fp8_block(weight, scale_inv).to(torch.bfloat16), residual)
