# pyright: basic
"""Packing and launch of `sm90_route.cu`, and of `sm90_choose.cu` behind the library's product for many rows.

Owns which routers the kernels take. Must not know experts' weights. Called by `sm90.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_packing import pack_bf16
from legato.ops.gemm.sm90_packing import Kept

_SOURCE = Path(__file__).with_name("sm90_route.cu")
_CHOOSE = Path(__file__).with_name("sm90_choose.cu")
#: Rows of a launch, and choices of a row.
MOST_ROWS, MOST_CHOICES = 128, 32
#: Warps of a block of `sm90_choose.cu`.
_WARPS = 8
#: Experts of a group; blocks of a group, which share K; their threads; K of a step; bytes of a step.
_EXPERTS, _PARTS, _THREADS, _STEP_K, _STEP_BYTES = 16, 8, 160, 64, 2048
#: Experts at most, so that all blocks run at once.
_MOST_EXPERTS = 256
_SHARED_BYTES = 190 * 1024
#: What a block asks for at least: how many of them stand beside the product before decides when the experts behind start
#: (NOTES.md).
_LEAST_SHARED_BYTES = 24 * 1024


def serves(num_experts: int, hidden: int) -> bool:
    """Whether a block's part of the weights fits its shared memory, in three terms, and all blocks the device."""
    return hidden % _STEP_K == 0 and _shared_bytes(hidden, 3) <= _SHARED_BYTES and num_experts <= _MOST_EXPERTS


def _shared_bytes(hidden: int, terms: int) -> int:
    return max(_LEAST_SHARED_BYTES, terms * -(-(hidden // _STEP_K) // _PARTS) * _STEP_BYTES)


def pack(weight: Tensor) -> Kept:
    """float32 [E, D] -> [terms, E, D]: bfloat16 matrices whose sum it is, one where it is bfloat16 already, else three; in the
    kernel's order uint8 [terms, ceil(E/16), D/64, 2048]."""
    rest, terms = weight.to(torch.float32), []
    while len(terms) < 3 and (not terms or bool((rest != 0).any())):
        terms.append(rest.to(torch.bfloat16))
        rest = rest - terms[-1].to(torch.float32)
    if len(terms) == 2:
        terms.append(torch.zeros_like(terms[0]))
    missing = -weight.shape[0] % _EXPERTS
    stacked = torch.stack(terms)
    return Kept(pack_bf16(torch.nn.functional.pad(stacked, (0, 0, 0, missing))), stacked)


def restore(terms: Tensor) -> Tensor:
    """The float32 [E, D] whose terms `pack` made."""
    total = terms[-1].to(torch.float32)
    for term in range(terms.shape[0] - 2, -1, -1):  # smallest first: every partial sum is exact
        total = total + terms[term].to(torch.float32)
    return total


@cache
def _kernel(hidden: int, num_experts: int, terms: int) -> tuple[Kernel, int]:
    groups, shared = -(-num_experts // _EXPERTS), _shared_bytes(hidden, terms)
    macros = {"HIDDEN": hidden, "EXPERTS": num_experts, "GROUPS": groups, "TERMS": terms, "MOST_ROWS": MOST_ROWS}
    return Kernel(Source(_SOURCE, macros), "route", shared_bytes=shared), shared


@cache
def _sums(device: torch.device, groups: int) -> tuple[Tensor, Tensor]:
    """Two buffers of the parts' sums in which nothing is there yet, and the state of the launches that take turns with them."""
    both = torch.full((2, MOST_ROWS, _PARTS, groups * _EXPERTS), -1, dtype=torch.int32, device=device)
    return both, torch.zeros(4, dtype=torch.int32, device=device)


def choose(packed: Tensor, x: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """One launch: x [T, D] bfloat16, 1 to MOST_ROWS rows, each aligned to 16 bytes; k at most 32."""
    rows, num_experts = x.shape[0], bias.shape[0]
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    kernel, shared = _kernel(packed.shape[2] * _STEP_K, num_experts, packed.shape[0])
    groups = packed.shape[1]
    sums, state = _sums(x.device, groups)
    how = Launch(
        grid=(_PARTS * groups,),
        block=(_THREADS,),
        cluster=(_PARTS,),
        shared_bytes=shared,
        programmatic=True,
    )
    kernel(how, packed, x, bias, ids, weights, sums, state, rows, x.stride(0), k, scale)
    return ids, weights


@cache
def _chooser(num_experts: int) -> Kernel:
    return Kernel(Source(_CHOOSE, {"EXPERTS": num_experts}), "choose_rows")


def choose_many(terms: Tensor, x: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [T, D] bfloat16, any number of rows: the library's products in float32, then the choice; k at most 32."""
    rows, num_experts = x.shape[0], bias.shape[0]
    logits = torch.mm(x, terms[-1].t(), out_dtype=torch.float32)
    for term in range(terms.shape[0] - 2, -1, -1):  # smallest first, as `restore` adds them
        logits += torch.mm(x, terms[term].t(), out_dtype=torch.float32)
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    how = Launch(grid=(-(-rows // _WARPS),), block=(32 * _WARPS,), programmatic=True)
    _chooser(num_experts)(how, logits, bias, ids, weights, rows, k, float(scale))
    return ids, weights
