# pyright: basic
"""The router and the experts on Hopper: packing at load, and who computes a call.

Owns the choice between the kernels, the library and the reference; nothing here waits for the device. Must not know
layers. Imported by `bind` only. A row's bits depend on nothing but that row, up to 16 rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.experts import moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4, route, sm90_launch, sm90_route
from legato.ops.experts import sm90_packing as packing
from legato.ops.experts.sm90_grouped import grouped
from legato.ops.experts.sm90_grouped import serves as serves_many
from legato.ops.experts.sm90_launch import MOST_ROWS, Experts, Packed
from legato.ops.experts.sm90_packing import by_experts
from legato.ops.experts.sm90_widen import widen_down, widen_gate_up
from legato.ops.pointwise import swiglu

#: Up to so many rows go through the kernel, MOST_ROWS at a time; more make products of whole experts, whose rows are sorted.
FEW_ROWS = 128
#: Up to so many rows the router's kernel chooses, 64 at a time; for more the library multiplies.
FEW_ROUTED = 256


def pack_route(weight: Tensor) -> Tensor:
    """A router's float32 weight as exact bfloat16 terms in the kernel's order; unchanged where its shape is not the
    kernel's."""
    return sm90_route.pack(weight) if sm90_route.serves(*weight.shape) else weight


@route.on("sm90", pack=pack_route)
def run_route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Rows of bfloat16: the kernel, 64 at a time; more than `FEW_ROUTED`: the library's product, then the choice. Rows of another
    type, or another weight: the reference."""
    if weight.dtype is not torch.uint8:
        return route.reference(x, weight, bias, k, scale)
    if x.dtype is not torch.bfloat16 or not x.shape[0] or k > sm90_route.MOST_CHOICES:
        return route.reference(x, sm90_route.restore(weight, bias.shape[0]), bias, k, scale)
    if x.shape[0] > FEW_ROUTED:
        return sm90_route.choose_many(weight, x, bias.to(torch.float32).contiguous(), k, scale)
    parts = [sm90_route.choose(weight, rows, bias, k, scale) for rows in _rows(x).split(sm90_route.MOST_ROWS)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([weights for _, weights in parts])


def pack_bf16(w13: Tensor, w2: Tensor, *shared: Tensor | None) -> tuple[Tensor | None, ...]:
    """bfloat16 experts in the kernel's order; unchanged where type or sizes are not its own. So in the other formats."""
    if not sm90_launch.serves(w13.shape[2], w2.shape[2]) or w13.dtype is not torch.bfloat16:
        return (w13, w2, *shared)
    packed = (by_experts(packing.pack_bf16, packing.together(w13)), by_experts(packing.pack_bf16, w2))
    return (*packed, *_pack_shared(w2.shape[2], *shared))


def pack_fp8(
    w13: Tensor, w13_scale_inv: Tensor, w2: Tensor, w2_scale_inv: Tensor, *shared: Tensor | None
) -> tuple[Tensor | None, ...]:
    hidden, width = w13.shape[2], w2.shape[2]
    if not sm90_launch.serves(hidden, width):
        return (w13, w13_scale_inv, w2, w2_scale_inv, *shared)
    scales13 = packing.together(w13_scale_inv.repeat_interleave(128 // 8, dim=1), group=1)
    scales2 = w2_scale_inv.repeat_interleave(128 // 8, dim=1)
    made13 = by_experts(packing.pack_fp8, packing.together(w13.view(torch.uint8)), scales13)
    made2 = by_experts(packing.pack_fp8, w2.view(torch.uint8), scales2)
    inside = w13_scale_inv.new_empty(0)
    return (made13, inside, made2, inside, *_pack_shared(width, *shared))


def pack_int4(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *shared: Tensor | None
) -> tuple[Tensor | None, ...]:
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
) -> tuple[Tensor | None, ...]:
    hidden, width = w13.shape[2] * 2, w2.shape[2] * 2
    if not sm90_launch.serves(hidden, width):
        return (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, *shared)
    factors = torch.cat((w13_scale_2, w2_scale_2.unsqueeze(1)), dim=1).to(torch.float32) * packing.NVFP4_FACTOR
    made13 = by_experts(packing.pack_nvfp4, packing.together(w13), packing.together(w13_scale))
    made2 = by_experts(packing.pack_nvfp4, w2, w2_scale)
    inside = w13_scale.new_empty(0)
    return (made13, inside, factors.contiguous(), made2, inside, inside, *_pack_shared(width, *shared))


def _pack_shared(width: int, *shared: Tensor | None) -> tuple[Tensor | None, ...]:
    """A shared expert as wide as the others, in bfloat16, in the kernel's order; any other as it is."""
    if not shared or shared[0] is None or shared[1] is None:
        return shared
    gate_up, down = shared[0], shared[1]
    if down.dtype is not torch.bfloat16 or gate_up.dtype is not torch.bfloat16 or down.shape[1] != width:
        return shared
    return packing.pack_bf16(packing.together(gate_up.unsqueeze(0))), packing.pack_bf16(down.unsqueeze(0))


@moe_bf16.on("sm90", pack=pack_bf16)
def run_bf16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """Up to 128 rows of bfloat16: the kernel, 64 at a time; more: products of whole experts, sorted rows.

    Rows of another type and weights that `pack` left unchanged: the reference. So in the other formats.
    """
    if w13.dtype is not torch.uint8:
        return moe_bf16.reference(x, ids, weights, w13, w2, shared_gate_up, shared_down)
    return _run("bf16", x, ids, weights, Packed(w13, w2, None, shared_gate_up, shared_down))


@moe_fp8_block.on("sm90", pack=pack_fp8)
def run_fp8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale_inv: Tensor,
    w2: Tensor,
    w2_scale_inv: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    if w13.dim() != 4:
        stored = (w13, w13_scale_inv, w2, w2_scale_inv)
        return moe_fp8_block.reference(x, ids, weights, *stored, shared_gate_up, shared_down)
    return _run("fp8", x, ids, weights, Packed(w13, w2, None, shared_gate_up, shared_down))


@moe_int4.on("sm90", pack=pack_int4)
def run_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    if w13.dim() != 4:
        stored = (w13, w13_scale, w2, w2_scale)
        return moe_int4.reference(x, ids, weights, *stored, shared_gate_up, shared_down)
    return _run("int4", x, ids, weights, Packed(w13, w2, None, shared_gate_up, shared_down))


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
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    if w13.dim() != 4:
        stored = (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2)
        return moe_nvfp4.reference(x, ids, weights, *stored, shared_gate_up, shared_down)
    return _run("nvfp4", x, ids, weights, Packed(w13, w2, w13_scale_2, shared_gate_up, shared_down))


def _run(form: str, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed) -> Tensor:
    inside = packed.shared13 is not None and packed.shared13.dtype is torch.uint8
    if packed.shared13 is not None and packed.shared2 is not None and not inside:
        alone = replace(packed, shared13=None, shared2=None)
        y = _run(form, x, ids, weights, alone)
        return y + functional.linear(swiglu(functional.linear(x, packed.shared13)), packed.shared2)
    if x.dtype is not torch.bfloat16:
        return _in_float32(form, x, ids, weights, packed)
    what = Experts(
        form,
        "bf16" if inside else None,
        hidden=packed.w2.shape[1] * packing.OUTPUTS,
        width=packed.w13.shape[1] * 8,
        num_experts=packed.w13.shape[0],
        blocks=sm90_launch.multiprocessors(x.device),
    )
    x, ids, weights = _rows(x), ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
    rows = x.shape[0]
    if not rows:
        return torch.empty_like(x)
    if rows <= MOST_ROWS:
        return sm90_launch.launch(what, packed, x, ids, weights)
    if rows <= FEW_ROWS or not serves_many(what.num_experts, ids.shape[1]):
        parts = zip(x.split(MOST_ROWS), ids.split(MOST_ROWS), weights.split(MOST_ROWS), strict=True)
        return torch.cat([sm90_launch.launch(what, packed, *part) for part in parts])
    y = grouped(what, packed, x, ids, weights)
    if packed.shared13 is None or packed.shared2 is None:
        return y
    gate_up = widen_gate_up("bf16", packed.shared13, None, torch.bfloat16)[0]
    down = widen_down("bf16", packed.shared2, None, torch.bfloat16)[0]
    return y + functional.linear(swiglu(functional.linear(x, gate_up)), down)


def _in_float32(form: str, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed) -> Tensor:
    """The reference on the exact values of packed weights."""
    w13 = widen_gate_up(form, packed.w13, packed.factors, torch.float32)
    w2 = widen_down(form, packed.w2, packed.factors, torch.float32)
    shared: list[Tensor] = []
    if packed.shared13 is not None and packed.shared2 is not None:
        shared = [widen_gate_up("bf16", packed.shared13, None, x.dtype)[0]]
        shared.append(widen_down("bf16", packed.shared2, None, x.dtype)[0])
    return moe_bf16.reference(x, ids, weights, w13, w2, *shared)


def _rows(x: Tensor) -> Tensor:
    """`x` with rows that 16-byte loads can read."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
