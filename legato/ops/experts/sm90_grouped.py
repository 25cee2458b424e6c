# pyright: basic
"""Experts for many rows: products of whole experts on the tensor cores, straight from the packed weights.

Owns the plan of a call (which rows an expert has), the launches and their buffers. Must not know how few rows are computed.
Called by `sm90.py`. Nothing is read on the host: a graph can hold it, and lengths and addresses stay on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import STORE, Kernel, Launch, Source
from legato.ops.experts.sm90_launch import FORMATS, Experts, Packed
from legato.ops.experts.sm90_packing import OUTPUTS, STEP_BYTES, STEP_K


@dataclass(frozen=True)
class Form:
    """How the products of a call are cut: rows of an expert at a time, computed as so many however few there are; warps of a
    block, each with 16 outputs; slots of a warp's ring of weights; pieces of 128 of K in a slot and in a stage of rows."""

    columns: int
    warps: int
    slots: int
    chunk: int


#: By format. Sixteen warps hide what widening waits for, but leave 112 registers a thread.
FORMS = {
    "bf16": (Form(32, 8, 3, 1), Form(80, 8, 3, 1), Form(144, 8, 3, 1)),
    "fp8": (
        *(Form(32, 16, 2, 2), Form(48, 16, 4, 1), Form(64, 16, 3, 1)),
        *(Form(80, 8, 3, 2), Form(112, 8, 3, 2), Form(144, 8, 2, 2)),
    ),
    "int4": (*(Form(columns, 16, 3, 2) for columns in (16, 32, 48, 64)), Form(144, 8, 2, 2)),
    "nvfp4": (
        *(Form(columns, 16, 3, 2) for columns in (16, 32, 48, 64)),
        *(Form(columns, 16, 2, 2) for columns in (80, 96, 112)),
    ),
}
#: What a tile costs beside its columns, in columns, since its weights are read and widened; how much more a tile of eight warps
#: costs; and so many rows short of whole tiles an expert counts as beyond them, for tiles go round the blocks in whole turns.
_WIDENING, _OF_EIGHT_WARPS, _SHORT = 100, 1.35, 2
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
#: Rows of a group of the sorted rows, and what an expert starts at a multiple of.
_GROUP, _UNIT = 8, 16
#: Up to so many rows several blocks share one when rows are copied and added up, each so many of its numbers.
_SHARED_ROWS, _SHARE = 4096, 2048
_FOLDER = Path(__file__).parent


def serves(num_experts: int, choices: int) -> bool:
    """Whether so many experts and choices fit the tables of the kernels."""
    return num_experts <= MOST_TILES // 2 and choices <= MOST_CHOICES


def _tiles(rows_of_an_expert: float, columns: int) -> float:
    """Tiles of an expert, on average: its rows spread about their mean as chance has it."""
    spread = math.sqrt(2 * rows_of_an_expert)
    ends = range(columns, int(rows_of_an_expert + 4 * spread) + columns, columns)
    return 1 + sum(math.erfc((end - _SHORT - rows_of_an_expert) / spread) / 2 for end in ends)


def form_for(form: str, hidden: int, rows_of_an_expert: float) -> Form:
    """The cut for so many rows of an expert on average: the one whose tiles cost least."""
    return _fitting(_cheapest(FORMS[form], rows_of_an_expert), hidden)


@cache
def _cheapest(forms: tuple[Form, ...], rows_of_an_expert: float) -> Form:
    def cost(cut: Form) -> float:
        each = (cut.columns + _WIDENING) * (_OF_EIGHT_WARPS if cut.warps == 8 else 1.0)
        return _tiles(rows_of_an_expert, cut.columns) * each

    return min(forms, key=cost)


def _fitting(cut: Form, hidden: int) -> Form:
    """The same, with as many warps as divide the outputs."""
    return cut if hidden % (cut.warps * OUTPUTS) == 0 else replace(cut, warps=8)


@cache
def product(form: str, cut: Form) -> tuple[Kernel, int]:
    """The kernel of a format, and its dynamic shared memory."""
    ring = cut.warps * cut.slots * cut.chunk * STEP_BYTES[form] * (128 // STEP_K[form])
    stage = cut.chunk * cut.columns * 256
    stages = min(_MOST_STAGES, (_SHARED_BYTES - ring) // stage)
    macros = {
        "FORMAT": FORMATS[form],
        "WARPS": cut.warps,
        "COLUMNS": cut.columns,
        "CHUNK": cut.chunk,
        "STAGES": stages,
        "SLOTS": cut.slots,
        "MOST_TILES": MOST_TILES,
    }
    shared = stages * stage + ring
    return Kernel(Source(_FOLDER / "sm90_grouped.cu", macros), "grouped", shared_bytes=shared), shared


@cache
def around(name: str, num_experts: int) -> Kernel:
    """One of the kernels around the products."""
    return Kernel(Source(_FOLDER / "sm90_pairs.cu", {"EXPERTS": num_experts}), name)


def grouped(
    what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor, added: Tensor | None = None
) -> Tensor:
    """The routed experts' sum for rows of bfloat16, each row's choices added up in their order in float32, then `added` [T, D]
    in bfloat16. Five launches for as many rows as are held at once: a plan, copies of the rows, two products, sums."""
    if STORE.noted is not None:  # how many rows come later nobody knows
        for cut in FORMS[what.routed]:
            product(what.routed, _fitting(cut, what.hidden))[0].is_noted()
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
    groups = capacity // _GROUP

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    def run(name: str, blocks: int, threads: int, *arguments: object, parts: int = 1) -> None:
        around(name, experts)(Launch(grid=(blocks, parts), block=(threads,), programmatic=True), *arguments)

    place, tiles, total = new(pairs), new(reached + pairs // cut.columns, 2), new(1)
    run("plan_pairs", 1, 1024, ids, pairs, cut.columns, place, tiles, total)
    sorted_rows = new(capacity, hidden, dtype=torch.bfloat16)
    shares = -(-hidden // _SHARE) if rows <= _SHARED_ROWS else 1
    run("sort_rows", rows, 256, x, place, sorted_rows, choices, hidden // 64, groups, x.stride(0), parts=shares)
    kernel, shared_bytes = product(what.routed, cut)
    threads = 32 * cut.warps + _LOADING
    how = Launch(grid=(what.blocks,), block=(threads,), shared_bytes=shared_bytes, programmatic=True)
    inner, per_tile = new(capacity, width, dtype=torch.bfloat16), cut.warps * OUTPUTS
    tiles13, tiles2 = 2 * width // per_tile, hidden // per_tile
    turn13, turn2 = divmod(what.blocks, tiles13), divmod(what.blocks, tiles2)
    kernel(
        how, packed.w13, packed.factors, sorted_rows, inner, tiles, total, hidden // 128, tiles13, groups, 1, *turn13
    )
    products = sorted_rows  # read to their end: the results take their place
    kernel(how, packed.w2, packed.factors, inner, products, tiles, total, width // 128, tiles2, groups, 0, *turn2)
    run("sum_choices", rows, 256, products, place, weights, added, y, choices, hidden, parts=shares)
