"""Where the rows of a decode batch stand: those that verify, and the single rows of the draft chain.

Owns the arithmetic from the device table to positions, slots and rotary tables, made once for all layers. A part of the folder's
vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import Case, Draw, Tolerance
from legato.ops.op import op
from legato.ops.pointwise import rope_angles
from legato.ops.rows.table import cache_slots, gather_rows

Stands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@op
def decode_rows(
    places: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    done: Tensor,
    num_drafts: Tensor,
    drafted: Tensor,
    page_table: Tensor,
    width: int,
    theta: float,
    rope_dim: int,
) -> Stands:
    """B requests with `width` = K + 1 rows each: the newest token, then the drafts behind it.

    Whatever has nothing to verify runs something that is run anyway, which reaches no expert and reads no page of its own, and
    stores nothing: rows behind the drafts that a request is offered run its first row once more, and a place that holds row 0,
    which is empty, runs the rows of the first place.

    places [B] int64 rows of the table, any number of them 0; tokens [M, K_max + 1] int64, lengths [M] int64 (the newest
    token's position), done [M] bool (row 0's is True), num_drafts [M] int64 drafts that the request verifies at most, drafted
    [M] int64 drafts that stand in its tokens, page_table [M, P] int32 -> with T = B * width, request by request: ids [T] int64,
    positions [T] int64, request [T] int32 (row of the page table), visible [T] int32 keys (position + 1), slots [T] int32 (-1
    where nothing is stored: run before, empty, finished, or past the table), cos and sin [T, rope_dim / 2] float32
    (`rope_angles`); and for each place base [B] int64 (its row's length), offered [B] int64 drafts: the least of num_drafts,
    drafted and K.
    """
    shown = torch.where(places > 0, places, places[:1])
    offered = torch.minimum(num_drafts, drafted).clamp(max=width - 1)
    rows, owners = (some[:, None].expand(-1, width).reshape(-1) for some in (shown, places))
    depth = torch.arange(width, device=places.device).expand(places.shape[0], -1).reshape(-1)
    is_repeated = depth > offered[rows]
    ids, positions = gather_rows.reference(tokens, lengths, rows, depth.masked_fill(is_repeated, 0))
    slots = cache_slots.reference(page_table, rows, positions).masked_fill(done[owners] | is_repeated, -1)
    cos, sin = rope_angles.reference(positions, theta, rope_dim)
    stands = ids, positions, rows.to(torch.int32), (positions + 1).to(torch.int32), slots, cos, sin
    return *stands, lengths[places], offered[places]


@op
def chain_rows(
    places: Tensor, base: Tensor, counts: Tensor, num_steps: int, theta: float, rope_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The single rows that draft after the first draft, one per request and step. They store nothing.

    places [B] int64, base [B] int64 (position of the first verifying row), counts [B] int64 emitted -> with T = num_steps * B,
    step by step: positions [T] int64 = base + max(counts - 1, 0) + step (from 1), request, visible and slots (all -1) [T]
    int32, cos and sin [T, rope_dim / 2] float32.
    """
    steps = torch.arange(1, num_steps + 1, device=places.device)
    positions = (base + (counts - 1).clamp(min=0) + steps[:, None]).reshape(-1)
    cos, sin = rope_angles.reference(positions, theta, rope_dim)
    request = places.to(torch.int32).repeat(num_steps)
    slots = torch.full_like(request, -1)
    return positions, request, (positions + 1).to(torch.int32), slots, cos, sin


#: cosf and sinf of two libraries may differ in the last bit.
_ANGLES = Tolerance(0.0, 2e-6)


def _decode_case(requests: int, width: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        places = draw.integers(requests, low=-5, high=17, dtype=torch.int64).clamp_min(0)  # about a third of them empty
        return (
            places,
            draw.integers(17, 8, low=0, high=8192, dtype=torch.int64),
            draw.integers(17, low=0, high=40 * 64, dtype=torch.int64),
            (draw.integers(17, low=0, high=4) == 0) | (torch.arange(17, device=draw.device) == 0),
            draw.integers(17, low=0, high=8, dtype=torch.int64),
            draw.integers(17, low=2, high=8, dtype=torch.int64),
            draw.integers(17, 40, low=-1, high=1000),
            width,
            8e6,
            64,
        )

    rows = requests * width
    return Case(decode_rows, f"decode_rows requests={requests} width={width}", make, _ANGLES, bytes=rows * 320)


def _chain_case(requests: int, num_steps: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        places = draw.integers(requests, low=0, high=17, dtype=torch.int64)
        base = draw.integers(requests, low=0, high=1 << 20, dtype=torch.int64)
        return places, base, draw.integers(requests, low=0, high=7, dtype=torch.int64), num_steps, 8e6, 64

    rows = requests * num_steps
    return Case(chain_rows, f"chain_rows requests={requests} steps={num_steps}", make, _ANGLES, bytes=rows * 320)


DECODE_CASES = (
    *(_decode_case(*shape) for shape in ((1, 6), (16, 6), (5, 1), (16, 8))),
    *(_chain_case(*shape) for shape in ((1, 4), (16, 4), (16, 6))),
)
