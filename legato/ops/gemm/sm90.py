# pyright: basic
"""Products of a few rows with a weight on Hopper, at the speed of memory: `sm90_linear.cu`, in bfloat16 and in FP8.

Owns the order of a packed weight and the launch. Must not know layers; how shapes are cut is in `sm90_tiling.py`.
Imported by `bind` only. A row's bits depend on nothing but that row. Nothing here reads a value on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.build import Kernel, Launch, Source
from legato.ops.gemm import (
    linear_bf16,
    linear_bf16_normed,
    linear_draft,
    linear_fp8_block,
    linear_fp8_block_normed,
    linear_swiglu,
    sm90_heads,
)
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.gemm.sm90_tiling import STRIP, TILES, WARPS, Tiling, tiling
from legato.ops.pointwise import rms_norm, swiglu

__all__ = ["sm90_heads"]  # attached by being imported

_SOURCE = Path(__file__).with_name("sm90_linear.cu")
#: Rows up to which launches follow one another, each reading the weight again; beyond, the library multiplies.
MOST_ROWS = 128


@cache
def kernel(cut: Tiling, tiles: int, swiglu: int = 0) -> tuple[Kernel, int]:
    """The kernel of a tiling for `tiles` tiles of 8 rows, and its dynamic shared memory. `swiglu`: 1 for a weight packed
    by `pack_swiglu`."""
    shared = cut.shared_bytes(tiles)
    source = Source(_SOURCE, {**cut.macros(tiles), "SWIGLU": swiglu})
    return Kernel(source, "linear", shared_bytes=shared), shared


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


@dataclass(frozen=True)
class Packed:
    """A weight that `arrange` made, and its tiling. `scale_inv`: of e4m3. `gated`: its outputs are gates and ups, which the
    kernel combines."""

    cut: Tiling
    weight: Tensor
    scale_inv: Tensor | None = None
    gated: bool = False


def multiply(packed: Packed, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [T, K] bfloat16 (T >= 1) with a packed weight: one launch for as many rows as its tiling takes, then the next."""
    rows, outputs = x.shape[0], packed.weight.shape[0] * STRIP
    y = torch.empty(rows, outputs // 2 if packed.gated else outputs, dtype=torch.bfloat16, device=x.device)
    x, residual = _rows(x), _residual(residual)
    step = 8 * packed.cut.most_tiles
    for first in range(0, rows, step):
        some = slice(first, first + step)
        _launch(packed, x[some], None if residual is None else residual[some], y[some])
    return y


def _launch(packed: Packed, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
    cut, weight, rows = packed.cut, packed.weight, x.shape[0]
    outputs = weight.shape[0] * STRIP
    compiled, shared = kernel(cut, next(tiles for tiles in TILES if 8 * tiles >= rows), int(packed.gated))
    groups = -(-weight.shape[0] // cut.strips)
    how = Launch(
        grid=(groups * cut.ranks,),
        block=(32 * WARPS,),
        cluster=(cut.ranks,) if cut.ranks > 1 else None,
        shared_bytes=shared,
        programmatic=True,
    )
    scales = () if packed.scale_inv is None else (packed.scale_inv, packed.scale_inv.shape[1])
    compiled(how, weight, x, residual, y, rows, outputs, weight.shape[1], x.stride(0), outputs, *scales)


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
    """Rounded once, as the kernel does."""
    return functional.linear(x, weight) if residual is None else torch.addmm(residual, x, weight.t())


def pack_bf16(weight: Tensor) -> Tensor:
    """A bfloat16 weight in the kernel's order; unchanged where its type is another or no tiling fits its shape."""
    found = tiling(*weight.shape, 16) if weight.dtype is torch.bfloat16 else None
    return weight if found is None else arrange(weight, found)


@linear_bf16.on("sm90", pack=pack_bf16)
def run_bf16(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Up to `MOST_ROWS` rows of bfloat16 with a packed weight: the kernel.

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
    if not 0 < x.shape[0] <= MOST_ROWS:
        return _by_library(x, restore(weight, cut), residual)
    return multiply(Packed(cut, weight), x, residual)


def norms(cut: Tiling) -> bool:
    """Whether the kernel can norm the rows of x itself: a block has all of K, and a warp its whole slice at once."""
    return cut.ranks == 1 and cut.x_slots == 1 and not cut.x_copies


@cache
def normed_kernel(cut: Tiling, tiles: int, k_blocks: int) -> tuple[Kernel, int]:
    """As `kernel`, for rows of so many blocks of K that are normed on the way in."""
    shared, macros = cut.shared_bytes(tiles), cut.macros(tiles)
    even = k_blocks == WARPS * macros["BATCH"] * macros["CHUNK"]
    return Kernel(Source(_SOURCE, {**macros, "NORM": 1, "EVEN": int(even)}), "linear", shared_bytes=shared), shared


@linear_bf16_normed.on("sm90", pack=pack_bf16)
def run_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Up to 16 rows of bfloat16 with a packed weight that one block has all of K of: one launch. Otherwise `rms_norm` as bound
    and the product."""
    rows = x.shape[0]
    cut = _cut_of(weight, 16) if weight.dim() == 5 else None
    if cut is None or not norms(cut) or x.dtype is not torch.bfloat16 or not 0 < rows <= 16:
        return run_bf16(rms_norm(x, norm, eps), weight)
    outputs = weight.shape[0] * STRIP
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    compiled, shared = normed_kernel(cut, 1 if rows <= 8 else 2, weight.shape[1])
    grid = (-(-weight.shape[0] // cut.strips),)
    how = Launch(grid=grid, block=(32 * WARPS,), shared_bytes=shared, programmatic=True)
    x = _rows(x)
    compiled(how, weight, x, None, y, rows, outputs, weight.shape[1], x.stride(0), outputs, norm, float(eps))
    return y


def pack_swiglu(gate_up: Tensor) -> Tensor:
    """A bfloat16 weight [2F, K] with rows in fours, of the gate and of the up in turn, in the kernel's order; unchanged
    where its type is another or no tiling fits its shape."""
    found = tiling(*gate_up.shape, 16) if gate_up.dtype is torch.bfloat16 else None
    return gate_up if found is None or gate_up.shape[0] % 8 else arrange(_in_turn(gate_up), found)


def _in_turn(gate_up: Tensor) -> Tensor:
    return gate_up.view(2, -1, 4, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def restore_swiglu(packed: Tensor, cut: Tiling) -> Tensor:
    """The weight [2F, K] that `pack_swiglu` was given."""
    in_turn = restore(packed, cut)
    return in_turn.view(-1, 2, 4, in_turn.shape[1]).transpose(0, 1).reshape(in_turn.shape)


@linear_swiglu.on("sm90", pack=pack_swiglu)
def run_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """Up to `MOST_ROWS` rows of bfloat16 with a packed weight: the kernel, with the bits of two launches. Otherwise the
    product and `swiglu` as bound."""
    if gate_up.dim() != 5:
        return swiglu(run_bf16(x, gate_up))
    cut = _cut_of(gate_up, 16)
    if x.dtype is not torch.bfloat16 or not 0 < x.shape[0] <= MOST_ROWS:
        return swiglu(run_bf16(x, restore_swiglu(gate_up, cut)))
    return multiply(Packed(cut, gate_up, gated=True), x)


def pack_fp8(weight: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3 weight in the kernel's order, and its scales; unchanged where no tiling fits its shape."""
    found = tiling(*weight.shape, 8)
    if found is None:
        return weight, scale_inv
    return arrange(weight.view(torch.uint8), found).view(torch.float8_e4m3fn), scale_inv.contiguous()


@linear_fp8_block.on("sm90", pack=pack_fp8)
def run_fp8(x: Tensor, weight: Tensor, scale_inv: Tensor, residual: Tensor | None = None) -> Tensor:
    """Up to `MOST_ROWS` rows of bfloat16 with a packed weight: the kernel, whose products are exact and whose scales
    multiply sums over 64 of K.

    Otherwise the weight is dequantised to bfloat16 for cuBLAS, or to float32 for the reference.
    """
    if weight.dim() == 5:
        cut = _cut_of(weight, 8)
        if _is_bf16(x, residual) and 0 < x.shape[0] <= MOST_ROWS:
            return multiply(Packed(cut, weight, scale_inv), x, residual)
        weight = restore(weight.view(torch.uint8), cut).view(torch.float8_e4m3fn)
    if not _is_bf16(x, residual):
        return linear_fp8_block.reference(x, weight, scale_inv, residual)
    return _by_library(x, dequantize_fp8_block(weight, scale_inv).to(torch.bfloat16), residual)


@linear_fp8_block_normed.on("sm90", pack=pack_fp8)
def run_fp8_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor, scale_inv: Tensor) -> Tensor:
    """`rms_norm` as bound, then the product."""
    return run_fp8(rms_norm(x, norm, eps), weight, scale_inv)


@linear_draft.on("sm90", pack=pack_bf16)
def run_draft(x: Tensor, weight: Tensor) -> Tensor:
    """As `run_bf16`; in float32 the reference."""
    return run_bf16(x, weight) if x.dtype is torch.bfloat16 else linear_draft.reference(x, _stored(weight))


def _stored(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else restore(weight, _cut_of(weight, 16))
