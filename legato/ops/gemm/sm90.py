# pyright: basic
"""Products of a few rows with a weight on Hopper, at the speed of memory: `sm90_linear.cu`, in bfloat16 and in FP8.

Owns the launch and who multiplies: the kernel, that for more rows (`sm90_many.py`), the library, the reference. Must not know
layers; how shapes are cut is in `sm90_tiling.py`, the order of weights in `sm90_packing.py`. Imported by `bind` only. A row's
bits depend on nothing but that row, for as many rows as a kernel takes. Nothing here reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.gemm import (
    linear_bf16,
    linear_bf16_normed,
    linear_draft,
    linear_fp8_block,
    linear_fp8_block_normed,
    linear_swiglu,
    sm90_heads,
    sm90_many,
)
from legato.ops.gemm.library import by_library
from legato.ops.gemm.sm90_packing import (
    Kept,
    arrange,
    in_turn,
    interleaved,
    restore,
    restore_swiglu,
    separated,
    stored_of,
)
from legato.ops.gemm.sm90_tiling import STRIP, TILES, WARPS, Tiling, shared_bytes, tiling
from legato.ops.pointwise import rms_norm, swiglu
from legato.ops.sample import best_of_keys, greedy_keys
from legato.ops.strides import dense, in_rows

__all__ = ["sm90_heads"]  # attached by being imported

_SOURCE = Path(__file__).with_name("sm90_linear.cu")
_WIDEN = Kernel(Source(Path(__file__).with_name("sm90_widen.cu")), "widen")
#: Rows that are normed inside the product, or of which it gives the best output alone, at most.
MOST_FUSED = 16


@cache
def kernel(cut: Tiling, tiles: int, swiglu: int = 0) -> tuple[Kernel, int]:
    """The kernel of a tiling for `tiles` tiles of 8 rows, and its dynamic shared memory. `swiglu`: 1 for a weight packed
    by `pack_swiglu`."""
    shared = cut.shared_bytes(tiles)
    source = Source(_SOURCE, {**cut.macros(tiles), "SWIGLU": swiglu})
    return Kernel(source, "linear", shared_bytes=shared), shared


@cache
def normed_kernel(cut: Tiling, tiles: int) -> tuple[Kernel, int]:
    """As `kernel`, for rows that are normed on the way in."""
    macros = cut.normed_macros(tiles)
    shared = shared_bytes(macros)
    return Kernel(Source(_SOURCE, macros), "linear", shared_bytes=shared), shared


def norms(cut: Tiling) -> bool:
    """Whether the kernel can norm the rows of x itself: a block has all of K, and a warp its whole slice at once."""
    return cut.ranks == 1 and cut.x_slots == 1 and not cut.x_copies


@cache
def best_kernel(cut: Tiling, tiles: int) -> tuple[Kernel, int]:
    """As `kernel`, for the best output of each row alone."""
    shared = cut.shared_bytes(tiles)
    return Kernel(Source(_SOURCE, {**cut.macros(tiles), "BEST": 1}), "linear", shared_bytes=shared), shared


@cache
def _ballot(device: torch.device) -> Tensor:
    """Where the blocks of a launch find the best output of a row; zero between launches, which follow one another."""
    return torch.zeros(2 * MOST_FUSED + 2, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Packed:
    """A weight that `arrange` made, and its tiling. `scale_inv`: of e4m3. `gated`: its outputs are gates and ups, which the
    kernel combines."""

    cut: Tiling
    weight: Tensor
    scale_inv: Tensor | None = None
    gated: bool = False

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] * STRIP

    @property
    def scales(self) -> tuple[Tensor | int, ...]:
        """The kernel's arguments for e4m3."""
        return () if self.scale_inv is None else (self.scale_inv, self.scale_inv.shape[1])

    def launch(self, made: tuple[Kernel, int]) -> tuple[Kernel, Launch]:
        """One of the tiling's kernels, and its launch."""
        groups, ranks = -(-self.weight.shape[0] // self.cut.strips), self.cut.ranks
        cluster = (ranks,) if ranks > 1 else None
        return made[0], Launch((groups * ranks,), (32 * WARPS,), cluster, made[1], programmatic=True)


def multiply(packed: Packed, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [T, K] bfloat16 (T >= 1) with a packed weight: one launch for as many rows as its tiling takes, then the next."""
    rows, outputs = x.shape[0], packed.outputs
    y = torch.empty(rows, outputs // 2 if packed.gated else outputs, dtype=torch.bfloat16, device=x.device)
    x, residual = in_rows(x), None if residual is None else dense(residual)
    step = 8 * packed.cut.most_tiles
    for first in range(0, rows, step):
        some = slice(first, first + step)
        _launch(packed, x[some], None if residual is None else residual[some], y[some])
    return y


def _launch(packed: Packed, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
    weight, rows, outputs = packed.weight, x.shape[0], packed.outputs
    tiles = next(tiles for tiles in TILES if 8 * tiles >= rows)
    compiled, how = packed.launch(kernel(packed.cut, tiles, int(packed.gated)))
    compiled(how, weight, x, residual, y, rows, outputs, x.stride(0), outputs, *packed.scales)


def multiply_normed(packed: Packed, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The same of up to 16 rows that are normed on the way in, for a tiling that `norms`."""
    rows, outputs, weight = x.shape[0], packed.outputs, packed.weight
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    compiled, how = packed.launch(normed_kernel(packed.cut, 1 if rows <= 8 else 2))
    x = in_rows(x)
    compiled(how, weight, x, None, y, rows, outputs, x.stride(0), outputs, *packed.scales, dense(norm), float(eps))
    return y


def multiply_best(packed: Packed, x: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Of up to 16 rows, the best of the first `width` outputs, numbered from `first` on: tokens and keys, each [T] int64."""
    rows, weight = x.shape[0], packed.weight
    tokens, keys = (torch.empty(rows, dtype=torch.int64, device=x.device) for _ in range(2))
    compiled, how = packed.launch(best_kernel(packed.cut, 1 if rows <= 8 else 2))
    x, outputs, ballot = in_rows(x), packed.outputs, (_ballot(x.device), keys, first, width)
    compiled(how, weight, x, None, tokens, rows, outputs, x.stride(0), outputs, *packed.scales, *ballot)
    return tokens, keys


def _cut_of(packed: Tensor, bits: int) -> Tiling:
    """The tiling that `arrange` was given for this weight."""
    found = tiling(packed.shape[0] * STRIP, packed.shape[1] * 512 // bits, bits)
    if found is None:
        raise ValueError(f"no tiling is recorded for a packed weight {tuple(packed.shape)} of {bits} bits")
    return found


def _is_bf16(x: Tensor, residual: Tensor | None = None) -> bool:
    return x.dtype is torch.bfloat16 and (residual is None or residual.dtype is torch.bfloat16)


def _few(x: Tensor, weight: Tensor | Kept, bits: int) -> tuple[Tiling, Tensor] | None:
    """The tiling by which the kernel multiplies these rows, and the weight in its order; None where it does not."""
    packed = weight.packed if isinstance(weight, Kept) else weight
    if packed.dim() != 5 or x.dtype is not torch.bfloat16:
        return None
    cut = _cut_of(packed, bits)
    return (cut, packed) if 0 < x.shape[0] <= cut.most_rows else None


def _few_normed(x: Tensor, norm: Tensor, weight: Tensor | Kept, bits: int) -> tuple[Tiling, Tensor] | None:
    """The same where the kernel norms these rows on the way in, by a bfloat16 `norm`."""
    few = _few(x, weight, bits) if norm.dtype is torch.bfloat16 and x.shape[0] <= MOST_FUSED else None
    return few if few is not None and norms(few[0]) else None


def _many(
    x: Tensor, weight: Tensor | Kept, residual: Tensor | None = None, scale_inv: Tensor | None = None
) -> Tensor | None:
    """The product by the kernel for more rows, which reads the weight as it is stored; None where it does not serve."""
    stored, bits = stored_of(weight), 16 if scale_inv is None else 8
    dtype = torch.bfloat16 if bits == 16 else torch.float8_e4m3fn
    if stored.dim() != 2 or stored.dtype is not dtype or not _is_bf16(x, residual):
        return None
    outputs, inputs = stored.shape
    if not sm90_many.serves(x.shape[0], outputs, inputs, bits):
        return None
    scales = None if scale_inv is None else scale_inv.to(torch.float32)
    return sm90_many.multiply(x, stored, residual, scales)


def _as_stored(weight: Tensor | Kept, back: Callable[[Tensor], Tensor]) -> Tensor:
    """The weight as it is stored, brought `back` where the kernel's order is all there is of it."""
    if isinstance(weight, Kept):
        return weight.stored
    return back(weight) if weight.dim() == 5 else weight


def _bf16_as_stored(packed: Tensor) -> Tensor:
    return restore(packed, _cut_of(packed, 16))


def _fp8_as_stored(packed: Tensor) -> Tensor:
    return restore(separated(packed.view(torch.uint8)), _cut_of(packed, 8)).view(torch.float8_e4m3fn)


def _arranged(weight: Tensor) -> Tensor | None:
    found = tiling(*weight.shape, 16) if weight.dtype is torch.bfloat16 else None
    return None if found is None else arrange(weight, found)


def pack_bf16(weight: Tensor) -> Tensor | Kept:
    """A bfloat16 weight in the kernel's order, beside itself; only itself where its type is another or no tiling fits its
    shape."""
    packed = _arranged(weight)
    return weight if packed is None else Kept(packed, weight)


def run_bf16(x: Tensor, weight: Tensor | Kept, residual: Tensor | None = None) -> Tensor:
    """As many rows of bfloat16 as they are faster for: the kernels. More, and weights that `pack` left unchanged: cuBLAS. Other
    types: the reference in float32."""
    if (made := _many(x, weight, residual)) is not None:
        return made
    if _is_bf16(x, residual) and (few := _few(x, weight, 16)) is not None:
        return multiply(Packed(*few), x, residual)
    stored = _as_stored(weight, _bf16_as_stored)
    if stored.dtype is torch.bfloat16 and _is_bf16(x, residual):
        return by_library(x, stored, residual)
    return linear_bf16.reference(x, stored, residual)


linear_bf16.on("sm90", pack=pack_bf16)(run_bf16)  # by hand: what is called here takes what `pack` made


@linear_bf16_normed.on("sm90", pack=pack_bf16)
def run_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor | Kept) -> Tensor:
    """Up to 16 rows of bfloat16 with a packed weight that one block has all of K of: one launch. Otherwise `rms_norm` as bound
    and the product."""
    if (few := _few_normed(x, norm, weight, 16)) is None:
        return run_bf16(rms_norm(x, norm, eps), weight)
    return multiply_normed(Packed(*few), x, norm, eps)


def pack_swiglu(gate_up: Tensor) -> Tensor | Kept:
    """A bfloat16 weight [2F, K] with rows in fours, of the gate and of the up in turn, in the kernel's order, beside itself; only
    itself where its type is another or no tiling fits its shape."""
    packed = _arranged(in_turn(gate_up)) if gate_up.shape[0] % 8 == 0 else None
    return gate_up if packed is None else Kept(packed, gate_up)


@linear_swiglu.on("sm90", pack=pack_swiglu)
def run_swiglu(x: Tensor, gate_up: Tensor | Kept) -> Tensor:
    """As many rows of bfloat16 as it is faster for: the kernel, with the bits of two launches. Otherwise the product and `swiglu`
    as bound."""
    if (few := _few(x, gate_up, 16)) is not None:
        return multiply(Packed(*few, gated=True), x)
    stored = _as_stored(gate_up, lambda packed: restore_swiglu(packed, _cut_of(packed, 16)))
    return swiglu(run_bf16(x, stored))


def pack_fp8(weight: Tensor, scale_inv: Tensor) -> tuple[Tensor | Kept, Tensor]:
    """An e4m3 weight in the kernel's order, beside itself, and its scales; only itself where no tiling fits its shape."""
    found = tiling(*weight.shape, 8)
    if found is None:
        return weight, scale_inv
    packed = interleaved(arrange(weight.view(torch.uint8), found)).view(torch.float8_e4m3fn)
    return Kept(packed, weight.contiguous()), scale_inv.to(torch.float32).contiguous()


def run_fp8(x: Tensor, weight: Tensor | Kept, scale_inv: Tensor, residual: Tensor | None = None) -> Tensor:
    """As many rows of bfloat16 as they are faster for: the kernels, whose products are exact and whose scales multiply sums over
    64 or 128 of K. More: cuBLAS on the weight in bfloat16, for which one launch widens it. Other types: the reference in
    float32."""
    if (made := _many(x, weight, residual, scale_inv)) is not None:
        return made
    if _is_bf16(x, residual) and (few := _few(x, weight, 8)) is not None:
        return multiply(Packed(*few, scale_inv), x, residual)
    stored = _as_stored(weight, _fp8_as_stored)
    if not _is_bf16(x, residual):
        return linear_fp8_block.reference(x, stored, scale_inv, residual)
    return by_library(x, widened(stored, scale_inv), residual)


linear_fp8_block.on("sm90", pack=pack_fp8)(run_fp8)


def widened(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """A weight of e4m3 in bfloat16: `dequantize_fp8_block`, rounded."""
    outputs, inputs = weight.shape
    made = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    how = Launch(grid=(-(-inputs // 128), -(-outputs // 128)), block=(256,))
    _WIDEN(how, weight.contiguous(), scale_inv.to(torch.float32).contiguous(), made, outputs, inputs)
    return made


@linear_fp8_block_normed.on("sm90", pack=pack_fp8)
def run_fp8_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor | Kept, scale_inv: Tensor) -> Tensor:
    """As `run_normed`, with a weight of e4m3."""
    if (few := _few_normed(x, norm, weight, 8)) is None:
        return run_fp8(rms_norm(x, norm, eps), weight, scale_inv)
    return multiply_normed(Packed(*few, scale_inv), x, norm, eps)


def _best_behind(logits: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    keys = greedy_keys(logits[:, :width], first)
    return best_of_keys(keys[None]), keys


def run_bf16_best(x: Tensor, weight: Tensor | Kept, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Up to 16 rows of bfloat16 with a packed weight: one launch that writes no logits. Otherwise the best of the product."""
    few = _few(x, weight, 16)
    if few is None or x.shape[0] > MOST_FUSED:
        return _best_behind(run_bf16(x, weight), first, width)
    return multiply_best(Packed(*few), x, first, width)


def run_fp8_best(x: Tensor, weight: Tensor | Kept, scale_inv: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """As `run_bf16_best`, with a weight of e4m3."""
    few = _few(x, weight, 8)
    if few is None or x.shape[0] > MOST_FUSED:
        return _best_behind(run_fp8(x, weight, scale_inv), first, width)
    return multiply_best(Packed(*few, scale_inv), x, first, width)


def pack_draft(weight: Tensor) -> Tensor:
    """A bfloat16 weight in the kernel's order alone: drafts are few rows."""
    packed = _arranged(weight)
    return weight if packed is None else packed


@linear_draft.on("sm90", pack=pack_draft)
def run_draft(x: Tensor, weight: Tensor) -> Tensor:
    """As `run_bf16`; in float32 the reference."""
    if x.dtype is torch.bfloat16:
        return run_bf16(x, weight)
    return linear_draft.reference(x, _as_stored(weight, _bf16_as_stored))
