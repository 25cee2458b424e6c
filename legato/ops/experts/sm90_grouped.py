# pyright: basic
"""Experts for many rows: products of whole experts on the tensor cores, straight from the packed weights.

Owns the plan of a call (which rows an expert has), the launches and their buffers. Must not know how few rows are computed.
Called by `sm90.py`. Nothing is read on the host: a graph can hold it, and lengths and addresses stay on the device.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_launch import FORMATS, Experts, Packed
from legato.ops.experts.sm90_packing import OUTPUTS, STEP_BYTES, STEP_K

#: Rows of an expert that one product takes, at most; the source knows how many it computes them as.
MOST_COLUMNS = 144
#: Tiles that a launch keeps in shared memory: one for each expert, and one more for every MOST_COLUMNS pairs.
MOST_TILES = 1024
#: Rows whose sorted copies are held at once: a row's are choices * 2 D bytes.
MOST_ROWS = 8192
#: Choices of a row whose places a block of `sort_rows` keeps.
MOST_CHOICES = 32
#: Slots of a warp's ring of weights, each of 16 outputs by 128 of K; stages of the ring of rows, at most.
_SLOTS = {"bf16": 3, "fp8": 4, "int4": 6, "nvfp4": 6}
_MOST_STAGES = 4
#: Shared memory of a multiprocessor less the system's, the barriers and the tiles.
_SHARED_BYTES = 217 * 1024
#: Two warpgroups that multiply and one that loads; a warp multiplies 16 outputs.
_THREADS, _WARPS = 384, 8
#: Pairs of a block that counts or places them; rows of a group of the sorted rows, and what an expert starts at a multiple of.
_PART, _GROUP, _UNIT = 512, 8, 16
_FOLDER = Path(__file__).parent


def serves(num_experts: int, choices: int) -> bool:
    """Whether so many experts and choices fit the tables of the kernels."""
    return num_experts <= MOST_TILES // 2 and choices <= MOST_CHOICES


@cache
def product(form: str) -> tuple[Kernel, int]:
    """The kernel of a format, and its dynamic shared memory."""
    ring = _WARPS * _SLOTS[form] * STEP_BYTES[form] * (128 // STEP_K[form])
    stage = MOST_COLUMNS * 256
    stages = min(_MOST_STAGES, (_SHARED_BYTES - ring) // stage)
    macros = {
        "FORMAT": FORMATS[form],
        "MOST_COLUMNS": MOST_COLUMNS,
        "STAGES": stages,
        "SLOTS": _SLOTS[form],
        "MOST_TILES": MOST_TILES,
    }
    shared = stages * stage + ring
    return Kernel(Source(_FOLDER / "sm90_grouped.cu", macros), "grouped", shared_bytes=shared), shared


@cache
def around(name: str, num_experts: int) -> Kernel:
    """One of the kernels around the products."""
    return Kernel(Source(_FOLDER / "sm90_pairs.cu", {"EXPERTS": num_experts, "PART": _PART}), name)


def grouped(what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed experts' sum for rows of bfloat16, each row's choices added up in their order in float32. Seven launches for as
    many rows as are held at once: count, plan, place and copy the rows, two products, sums."""
    y = torch.empty(x.shape[0], what.hidden, dtype=torch.bfloat16, device=x.device)
    step = min(MOST_ROWS, (MOST_TILES - what.num_experts) * MOST_COLUMNS // ids.shape[1])
    for first in range(0, x.shape[0], step):
        some = slice(first, first + step)
        _grouped(what, packed, x[some], ids[some], weights[some], y[some])
    return y


def _grouped(what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> None:
    rows, choices = ids.shape
    pairs, experts, hidden, width = rows * choices, what.num_experts, what.hidden, what.width
    reached = min(experts, pairs)
    capacity = -(-(pairs + (_UNIT - 1) * reached) // _UNIT) * _UNIT
    groups, parts = capacity // _GROUP, -(-pairs // _PART)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    def run(name: str, blocks: int, threads: int, *arguments: object) -> None:
        around(name, experts)(Launch(grid=(blocks,), block=(threads,), programmatic=True), *arguments)

    counts, place, tiles, total = new(parts, experts), new(pairs), new(reached + pairs // MOST_COLUMNS, 2), new(1)
    run("count_pairs", parts, _PART, ids, pairs, counts)
    run("plan_pairs", 1, 1024, counts, parts, MOST_COLUMNS, tiles, total)
    run("place_pairs", parts, _PART, ids, counts, pairs, place)
    sorted_rows = new(capacity, hidden, dtype=torch.bfloat16)
    run("sort_rows", rows, 256, x, place, sorted_rows, choices, hidden // 64, groups, x.stride(0))
    kernel, shared_bytes = product(what.routed)
    how = Launch(grid=(what.blocks,), block=(_THREADS,), shared_bytes=shared_bytes, programmatic=True)
    inner, per_tile = new(capacity, width, dtype=torch.bfloat16), _WARPS * OUTPUTS
    sizes13, sizes2 = (hidden // 128, 2 * width // per_tile), (width // 128, hidden // per_tile)
    kernel(how, packed.w13, packed.factors, sorted_rows, inner, tiles, total, *sizes13, groups, 1)
    products = sorted_rows  # read to their end: the results take their place
    kernel(how, packed.w2, packed.factors, inner, products, tiles, total, *sizes2, groups, 0)
    run("sum_choices", rows, 256, products, place, weights, None, y, choices, hidden)
