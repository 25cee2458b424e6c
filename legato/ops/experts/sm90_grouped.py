# pyright: basic
"""Experts for many rows: products of whole experts on the tensor cores, straight from the packed weights.

Owns the plan of a call (which rows an expert has), the launches and their buffers. Must not know how few rows are computed.
Called by `sm90.py`. Nothing is read on the host: a graph can hold it, and lengths and addresses stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_launch import FORMATS, Experts, Packed
from legato.ops.experts.sm90_packing import OUTPUTS, STEP_BYTES, STEP_K


@dataclass(frozen=True)
class Form:
    """How the products of a call are cut: rows of an expert at a time, computed as so many however few there are; warps of a
    block, each with 16 outputs; slots of a warp's ring of weights, each of 16 outputs by 128 of K."""

    columns: int
    warps: int
    slots: int


#: By format, narrow to wide. Sixteen warps hide what widening waits for, but leave 112 registers a thread.
FORMS = {
    "bf16": (Form(32, 8, 3), Form(80, 8, 3), Form(144, 8, 3)),
    "fp8": (Form(32, 16, 4), Form(80, 8, 4), Form(144, 8, 4)),
    "int4": (Form(32, 16, 6), Form(80, 8, 6), Form(144, 8, 6)),
    "nvfp4": (Form(32, 16, 6), Form(80, 16, 6), Form(144, 8, 6)),
}
#: How much wider a form is than the rows that an expert has on average: most experts' rows are one tile then.
_MARGIN = 1.25
#: Tiles that a launch keeps in shared memory: one for each expert, and one more for every `columns` pairs.
MOST_TILES = 1024
#: Rows whose sorted copies are held at once: a row's are choices * 2 D bytes.
MOST_ROWS = 8192
#: Choices of a row whose places a block of `sort_rows` keeps.
MOST_CHOICES = 32
#: Stages of the ring of rows, at most.
_MOST_STAGES = 4
#: Shared memory of a multiprocessor less the system's, the barriers and the tiles.
_SHARED_BYTES = 217 * 1024
#: Threads of the warpgroup that loads.
_LOADING = 128
#: Pairs of a block that counts or places them; rows of a group of the sorted rows, and what an expert starts at a multiple of.
_PART, _GROUP, _UNIT = 512, 8, 16
_FOLDER = Path(__file__).parent


def serves(num_experts: int, choices: int) -> bool:
    """Whether so many experts and choices fit the tables of the kernels."""
    return num_experts <= MOST_TILES // 2 and choices <= MOST_CHOICES


def form_for(form: str, hidden: int, rows_of_an_expert: float) -> Form:
    """The cut for so many rows of an expert on average."""
    wide = (found for found in FORMS[form] if found.columns >= _MARGIN * rows_of_an_expert)
    chosen = next(wide, FORMS[form][-1])
    return chosen if hidden % (chosen.warps * OUTPUTS) == 0 else replace(chosen, warps=8)


@cache
def product(form: str, cut: Form) -> tuple[Kernel, int]:
    """The kernel of a format, and its dynamic shared memory."""
    ring = cut.warps * cut.slots * STEP_BYTES[form] * (128 // STEP_K[form])
    stage = cut.columns * 256
    stages = min(_MOST_STAGES, (_SHARED_BYTES - ring) // stage)
    macros = {
        "FORMAT": FORMATS[form],
        "WARPS": cut.warps,
        "COLUMNS": cut.columns,
        "STAGES": stages,
        "SLOTS": cut.slots,
        "MOST_TILES": MOST_TILES,
    }
    shared = stages * stage + ring
    return Kernel(Source(_FOLDER / "sm90_grouped.cu", macros), "grouped", shared_bytes=shared), shared


@cache
def around(name: str, num_experts: int) -> Kernel:
    """One of the kernels around the products."""
    return Kernel(Source(_FOLDER / "sm90_pairs.cu", {"EXPERTS": num_experts, "PART": _PART}), name)


def grouped(
    what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor, added: Tensor | None = None
) -> Tensor:
    """The routed experts' sum for rows of bfloat16, each row's choices added up in their order in float32, then `added` [T, D]
    in bfloat16. Seven launches for as many rows as are held at once: count, plan, place and copy the rows, two products, sums."""
    y = torch.empty(x.shape[0], what.hidden, dtype=torch.bfloat16, device=x.device)
    choices = ids.shape[1]
    cut = form_for(what.routed, what.hidden, min(x.shape[0], MOST_ROWS) * choices / what.num_experts)
    step = rows_held(cut, what.num_experts, choices)
    for first in range(0, x.shape[0], step):
        some = slice(first, first + step)
        _grouped(what, cut, packed, x[some], ids[some], weights[some], None if added is None else added[some], y[some])
    return y


def rows_held(cut: Form, num_experts: int, choices: int) -> int:
    """How many rows are held at once: no more than their tiles fit the list, however the pairs are spread."""
    return min(MOST_ROWS, (MOST_TILES - num_experts) * cut.columns // choices)


def _grouped(
    what: Experts, cut: Form, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor, added: Tensor | None, y: Tensor
) -> None:
    rows, choices = ids.shape
    pairs, experts, hidden, width = rows * choices, what.num_experts, what.hidden, what.width
    reached = min(experts, pairs)
    capacity = -(-(pairs + (_UNIT - 1) * reached) // _UNIT) * _UNIT
    groups, parts = capacity // _GROUP, -(-pairs // _PART)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    def run(name: str, blocks: int, threads: int, *arguments: object) -> None:
        around(name, experts)(Launch(grid=(blocks,), block=(threads,), programmatic=True), *arguments)

    counts, place, tiles, total = new(parts, experts), new(pairs), new(reached + pairs // cut.columns, 2), new(1)
    run("count_pairs", parts, _PART, ids, pairs, counts)
    run("plan_pairs", 1, 1024, counts, parts, cut.columns, tiles, total)
    run("place_pairs", parts, _PART, ids, counts, pairs, place)
    sorted_rows = new(capacity, hidden, dtype=torch.bfloat16)
    run("sort_rows", rows, 256, x, place, sorted_rows, choices, hidden // 64, groups, x.stride(0))
    kernel, shared_bytes = product(what.routed, cut)
    threads = 32 * cut.warps + _LOADING
    how = Launch(grid=(what.blocks,), block=(threads,), shared_bytes=shared_bytes, programmatic=True)
    inner, per_tile = new(capacity, width, dtype=torch.bfloat16), cut.warps * OUTPUTS
    sizes13, sizes2 = (hidden // 128, 2 * width // per_tile), (width // 128, hidden // per_tile)
    kernel(how, packed.w13, packed.factors, sorted_rows, inner, tiles, total, *sizes13, groups, 1)
    products = sorted_rows  # read to their end: the results take their place
    kernel(how, packed.w2, packed.factors, inner, products, tiles, total, *sizes2, groups, 0)
    run("sum_choices", rows, 256, products, place, weights, added, y, choices, hidden)
