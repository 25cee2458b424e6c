# pyright: basic
"""The router and the experts on Hopper: packing at load, and who computes a call.

Owns the choice between the kernels, the library and the reference; nothing here waits for the device. Must not know
layers. Imported by `bind` only. A row's bits depend on nothing but that row, up to 16 rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.experts import moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4, route, sm90_launch, sm90_route
from legato.ops.experts import sm90_packing as packing
from legato.ops.experts.sm90_grouped import grouped
from legato.ops.experts.sm90_grouped import serves as serves_many
from legato.ops.experts.sm90_launch import Experts, Packed, most_rows
from legato.ops.experts.sm90_packing import by_experts
from legato.ops.experts.sm90_widen import widen_down, widen_gate_up
from legato.ops.gemm import linear_fp8_block
from legato.ops.gemm.sm90_packing import Kept
from legato.ops.pointwise import swiglu
from legato.ops.strides import in_rows

#: Rows and columns of an FP8 weight that share a scale.
BLOCK = 128
#: Up to so many rows the router's kernel chooses, 128 at a time; for more the library multiplies, once for each of the terms.
FEW_ROUTED = {1: 96, 3: 256}


def pack_route(weight: Tensor) -> Tensor | Kept:
    """A router's float32 weight as exact bfloat16 terms, in the kernel's order too; unchanged where its shape is not the
    kernel's."""
    return sm90_route.pack(weight) if sm90_route.serves(*weight.shape) else weight


@route.on("sm90", pack=pack_route)
def run_route(x: Tensor, weight: Tensor | Kept, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Rows of bfloat16: the kernel, 128 at a time; more than `FEW_ROUTED`: the library's product, then the choice. Other rows, or
    another weight: the reference."""
    if not isinstance(weight, Kept):
        return route.reference(x, weight, bias, k, scale)
    if x.dtype is not torch.bfloat16 or not x.shape[0] or k > sm90_route.MOST_CHOICES:
        return route.reference(x, sm90_route.restore(weight.stored), bias, k, scale)
    bias = bias.to(torch.float32).contiguous()
    if x.shape[0] > FEW_ROUTED[weight.packed.shape[0]]:
        return sm90_route.choose_many(weight.stored, x, bias, k, scale)
    parts = [sm90_route.choose(weight.packed, rows, bias, k, scale) for rows in in_rows(x).split(sm90_route.MOST_ROWS)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([weights for _, weights in parts])


def pack_bf16(w13: Tensor, w2: Tensor, *shared: Tensor | None) -> tuple[Tensor | Kept | None, ...]:
    """bfloat16 experts in the kernel's order; unchanged where type or sizes are not its own. So in the other formats."""
    are_bf16 = w13.dtype is torch.bfloat16 and w2.dtype is torch.bfloat16
    if not sm90_launch.serves(w13.shape[2], w2.shape[2]) or not are_bf16:
        return (w13, w2, *shared)
    packed = (by_experts(packing.pack_bf16, packing.together(w13)), by_experts(packing.pack_bf16, w2))
    # A launch of bfloat16 experts reads a shared one in copies of two steps; of FP8 those are more than the 128 of K of a copy.
    of_fp8 = len(shared) == 4 and shared[2] is not None
    return (*packed, *_pack_shared(None if of_fp8 else w2.shape[2], *shared))


def pack_fp8(
    w13: Tensor, w13_scale_inv: Tensor, w2: Tensor, w2_scale_inv: Tensor, *shared: Tensor | None
) -> tuple[Tensor | Kept | None, ...]:
    hidden, width = w13.shape[2], w2.shape[2]
    if not sm90_launch.serves(hidden, width):
        return (w13, w13_scale_inv, w2, w2_scale_inv, *shared)
    made13, made2 = _fp8_gate_up(w13, w13_scale_inv), _fp8_down(w2, w2_scale_inv)
    inside = w13_scale_inv.new_empty(0)
    return (made13, inside, made2, inside, *_pack_shared(width, *shared))


def _fp8_gate_up(w13: Tensor, scale_inv: Tensor) -> Tensor:
    scales = packing.together(_of_eight(scale_inv), group=1)
    return by_experts(packing.pack_fp8, packing.together(w13.view(torch.uint8)), scales)


def _fp8_down(w2: Tensor, scale_inv: Tensor) -> Tensor:
    return by_experts(packing.pack_fp8, w2.view(torch.uint8), _of_eight(scale_inv))


def _of_eight(scale_inv: Tensor) -> Tensor:
    """The scales [E, N/128, K/128] of blocks as those of every eight outputs, float32 [E, N/8, K/128]."""
    return scale_inv.to(torch.float32).repeat_interleave(BLOCK // 8, dim=1)


def pack_int4(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *shared: Tensor | None
) -> tuple[Tensor | Kept | None, ...]:
    hidden, width = w13.shape[2] * 2, w2.shape[2] * 2
    exact = all(bool((scale.to(torch.bfloat16) == scale).all()) for scale in (w13_scale, w2_scale))
    if not sm90_launch.serves(hidden, width) or not exact:
        return (w13, w13_scale, w2, w2_scale, *shared)
    scales13, scales2 = packing.together(w13_scale).to(torch.bfloat16), w2_scale.to(torch.bfloat16)
    made13 = by_experts(packing.pack_int4, packing.together(w13), scales13)
    inside = w13_scale.new_empty(0)
    return (made13, inside, by_experts(packing.pack_int4, w2, scales2), inside, *_pack_shared(width, *shared))


def pack_nvfp4(
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    *shared: Tensor | None,
) -> tuple[Tensor | Kept | None, ...]:
    hidden, width = w13.shape[2] * 2, w2.shape[2] * 2
    if not sm90_launch.serves(hidden, width):
        return (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, *shared)
    factors = torch.cat((w13_scale_2, w2_scale_2.unsqueeze(1)), dim=1).to(torch.float32) * packing.NVFP4_FACTOR
    made13 = by_experts(packing.pack_nvfp4, packing.together(w13), packing.together(w13_scale))
    made2 = by_experts(packing.pack_nvfp4, w2, w2_scale)
    inside = w13_scale.new_empty(0)
    return (made13, inside, factors.contiguous(), made2, inside, inside, *_pack_shared(width, *shared))


def _pack_shared(
    width: int | None,
    gate_up: Tensor | None = None,
    down: Tensor | None = None,
    gate_up_scale_inv: Tensor | None = None,
    down_scale_inv: Tensor | None = None,
) -> tuple[Tensor | Kept | None, ...]:
    """A shared expert as wide as the others, in bfloat16 or FP8 blocks, in the kernel's order, in bfloat16 beside itself; any
    other, or any where `width` is None, as it is stored: products of its own compute it."""
    if gate_up is None or down is None:
        return ()
    alike = down.shape[1] == width
    if gate_up_scale_inv is None or down_scale_inv is None:
        if not alike or down.dtype is not torch.bfloat16 or gate_up.dtype is not torch.bfloat16:
            return gate_up, down
        packed13 = packing.pack_bf16(packing.together(gate_up.unsqueeze(0)))
        return Kept(packed13, gate_up), Kept(packing.pack_bf16(down.unsqueeze(0)), down)
    if not alike or down.shape[1] % BLOCK:
        return gate_up, down, gate_up_scale_inv, down_scale_inv
    packed = _fp8_gate_up(gate_up[None], gate_up_scale_inv[None]), _fp8_down(down[None], down_scale_inv[None])
    return *packed, None, None  # scales are inside


@moe_bf16.on("sm90", pack=pack_bf16)
def run_bf16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_gate_up: Tensor | Kept | None = None,
    shared_down: Tensor | Kept | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """Up to 128 rows of bfloat16: one launch; more: products of whole experts, sorted rows.

    Rows of another type and weights that `pack` left unchanged: the reference. So in the other formats.
    """
    shared: tuple[Any, ...] = shared_gate_up, shared_down, shared_gate_up_scale_inv, shared_down_scale_inv
    if w13.dtype is not torch.uint8:
        return moe_bf16.reference(x, ids, weights, w13, w2, *shared)
    return _run("bf16", x, ids, weights, _packed(w13, w2, None, *shared))


@moe_fp8_block.on("sm90", pack=pack_fp8)
def run_fp8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale_inv: Tensor,
    w2: Tensor,
    w2_scale_inv: Tensor,
    shared_gate_up: Tensor | Kept | None = None,
    shared_down: Tensor | Kept | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    shared: tuple[Any, ...] = shared_gate_up, shared_down, shared_gate_up_scale_inv, shared_down_scale_inv
    if w13.dim() != 4:
        stored = (w13, w13_scale_inv, w2, w2_scale_inv)
        return moe_fp8_block.reference(x, ids, weights, *stored, *shared)
    return _run("fp8", x, ids, weights, _packed(w13, w2, None, *shared))


@moe_int4.on("sm90", pack=pack_int4)
def run_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shared_gate_up: Tensor | Kept | None = None,
    shared_down: Tensor | Kept | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    shared: tuple[Any, ...] = shared_gate_up, shared_down, shared_gate_up_scale_inv, shared_down_scale_inv
    if w13.dim() != 4:
        stored = (w13, w13_scale, w2, w2_scale)
        return moe_int4.reference(x, ids, weights, *stored, *shared)
    return _run("int4", x, ids, weights, _packed(w13, w2, None, *shared))


@moe_nvfp4.on("sm90", pack=pack_nvfp4)
def run_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    shared_gate_up: Tensor | Kept | None = None,
    shared_down: Tensor | Kept | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    shared: tuple[Any, ...] = shared_gate_up, shared_down, shared_gate_up_scale_inv, shared_down_scale_inv
    if w13.dim() != 4:
        stored = (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2)
        return moe_nvfp4.reference(x, ids, weights, *stored, *shared)
    return _run("nvfp4", x, ids, weights, _packed(w13, w2, w13_scale_2, *shared))


def _packed(w13: Tensor, w2: Tensor, factors: Tensor | None, *shared: Any) -> Packed:
    """`shared`: gate_up, down and their block scales, as `pack` made them."""
    gate_up, down = shared[:2]
    if isinstance(gate_up, Kept):
        return Packed(w13, w2, factors, gate_up.packed, down.packed, stored=(gate_up.stored, down.stored))
    return Packed(w13, w2, factors, *shared)


def _run(form: str, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed) -> Tensor:
    if packed.shared13 is not None and packed.shared2 is not None and packing.form_of(packed.shared13) is None:
        alone = replace(packed, shared13=None, shared2=None)
        inner = swiglu(_linear(x, packed.shared13, packed.shared13_scale_inv))
        return _run(form, x, ids, weights, alone) + _linear(inner, packed.shared2, packed.shared2_scale_inv)
    if x.dtype is not torch.bfloat16:
        return _in_float32(form, x, ids, weights, packed)
    what = Experts(
        form,
        None if packed.shared13 is None else packing.form_of(packed.shared13),
        hidden=packed.w2.shape[1] * packing.OUTPUTS,
        width=packed.w13.shape[1] * 8,
        num_experts=packed.w13.shape[0],
        blocks=sm90_launch.multiprocessors(x.device),
    )
    x, ids, weights = in_rows(x), ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
    rows = x.shape[0]
    if not rows:
        return torch.empty_like(x)
    most = most_rows(what, ids.shape[1])
    if rows <= most:
        return sm90_launch.launch(what, packed, x, ids, weights)
    if not serves_many(what.num_experts, ids.shape[1]):
        parts = zip(x.split(most), ids.split(most), weights.split(most), strict=True)
        return torch.cat([sm90_launch.launch(what, packed, *part) for part in parts])
    if packed.shared13 is None or packed.shared2 is None:
        return grouped(what, packed, x, ids, weights)
    gate_up, down = packed.stored or _shared_in(torch.bfloat16, packed.shared13, packed.shared2)
    return grouped(what, packed, x, ids, weights, functional.linear(swiglu(functional.linear(x, gate_up)), down))


def _linear(x: Tensor, weight: Tensor, scale_inv: Tensor | None) -> Tensor:
    """Of a shared expert that is not in the kernel's order."""
    return functional.linear(x, weight) if scale_inv is None else linear_fp8_block(x, weight, scale_inv)


def _shared_in(dtype: torch.dtype, shared13: Tensor, shared2: Tensor) -> tuple[Tensor, Tensor]:
    """The shared expert's gate_up and down from the kernel's order."""
    form = packing.form_of(shared13)
    assert form is not None, "it was packed"
    return widen_gate_up(form, shared13, None, dtype)[0], widen_down(form, shared2, None, dtype)[0]


def _in_float32(form: str, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed) -> Tensor:
    """The reference on the exact values of packed weights."""
    w13 = widen_gate_up(form, packed.w13, packed.factors, torch.float32)
    w2 = widen_down(form, packed.w2, packed.factors, torch.float32)
    shared: tuple[Tensor, ...] = ()
    if packed.shared13 is not None and packed.shared2 is not None:
        shared = _shared_in(x.dtype, packed.shared13, packed.shared2)
    return moe_bf16.reference(x, ids, weights, w13, w2, *shared)
