# pyright: basic, reportPrivateImportUsage=false
"""Packed experts back to rows of numbers, for the library and the references.

Owns the launch of `sm90_expand.cu`. Must not know what is multiplied. Called by `sm90.py`. Nothing is read on the host: a graph
can hold it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_launch import FORMATS
from legato.ops.experts.sm90_packing import OUTPUTS, STEP_K

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
