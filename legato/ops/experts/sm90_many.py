# pyright: basic, reportPrivateImportUsage=false
"""Experts for many rows: packed weights widened once per call, and the library's grouped products.

Owns `widen` (packed experts back to rows of numbers) and the order of pairs. Must not know how few rows are computed.
Called by `sm90.py`. Nothing is read on the host: a graph can hold it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_launch import FORMATS, Experts, Packed
from legato.ops.experts.sm90_packing import OUTPUTS, STEP_K
from legato.ops.pointwise import swiglu

_SOURCE = Path(__file__).with_name("sm90_expand.cu")
_WARPS = 8


@cache
def _kernel(form: str, gated: bool, dtype: torch.dtype) -> Kernel:
    macros = {"FORMAT": FORMATS[form], "GATED": int(gated), "WIDE": int(dtype is torch.float32)}
    return Kernel(Source(_SOURCE, macros), "expand")


def widen_gate_up(form: str, packed: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Packed w13 -> [E, 2F, D] (gate rows, then up rows) in bfloat16, rounded once, or float32."""
    return _widen(_kernel(form, True, dtype), packed, factors, dtype, form)


def widen_down(form: str, packed: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Packed w2 -> [E, D, F] in bfloat16, rounded once, or float32."""
    return _widen(_kernel(form, False, dtype), packed, factors, dtype, form)


def _widen(kernel: Kernel, packed: Tensor, factors: Tensor | None, dtype: torch.dtype, form: str) -> Tensor:
    experts, tiles, steps = packed.shape[:3]
    outputs, inputs = tiles * OUTPUTS, steps * STEP_K[form]
    out = torch.empty(experts, outputs, inputs, dtype=dtype, device=packed.device)
    how = Launch(grid=(-(-experts * tiles * steps // _WARPS),), block=(32 * _WARPS,))
    kernel(how, packed, factors, out, outputs, inputs, ctypes.c_uint64(experts * tiles * steps))
    return out


def many_rows(what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed experts' sum for rows of bfloat16, without the shared expert: pairs sorted by expert, two grouped
    products, each row's choices added up in their order in float32."""
    rows, choices = ids.shape
    chosen = ids.reshape(-1)
    key = torch.where((chosen >= 0) & (chosen < what.num_experts), chosen, what.num_experts)
    by_expert, order = key.sort(stable=True)
    experts = torch.arange(what.num_experts, device=x.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
    w13 = widen_gate_up(what.routed, packed.w13, packed.factors, torch.bfloat16)
    inner = swiglu.reference(torch._grouped_mm(x[order // choices], w13.transpose(1, 2), offs=ends))
    del w13
    w2 = widen_down(what.routed, packed.w2, packed.factors, torch.bfloat16)
    products = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    del w2
    # Rows past the last expert's, masked pairs, hold whatever the product left there.
    products = torch.where((by_expert < what.num_experts).unsqueeze(1), products, 0)
    terms = torch.empty_like(products).index_copy_(0, order, products).view(rows, choices, -1)
    total = torch.zeros(rows, what.hidden, dtype=torch.float32, device=x.device)
    for choice in range(choices):
        total += weights[:, choice, None] * terms[:, choice]
    return total.to(x.dtype)
