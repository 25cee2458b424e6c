"""What a request emits: the drafts that its own samples confirm and one token more, cut where it ends; and what that leaves for
the draft layer to run.

A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import EXACT, Case, Draw
from legato.ops.op import op
from legato.ops.sample import verify


def cut(sampled: Tensor, counts: Tensor, stop_ids: Tensor, limits: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts what was accepted at the first stop id, at the length limit and at the end of the row's pages, whichever comes first.

    The end of the pages ends no request: it goes on, with the same tokens, once it has been granted a page.

    Args:
        sampled: [B, R] int64 tokens.
        counts: [B] int64, how many of them were accepted.
        stop_ids: [B, *] int64, -1 where unused.
        limits: [B] int64 tokens that may still be emitted (0 or less: none).
        room: [B] int64 positions that the row's pages can still take (0 or less: none).

    Returns:
        [B] int64 counts after the cut, and [B] bool whether the request ends here.
    """
    width = sampled.shape[1]
    offsets = torch.arange(width, device=sampled.device)
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(-1) & (offsets < counts[:, None])
    first_stop = torch.where(is_stop, offsets, torch.full_like(offsets, width)).amin(1)
    stopped = torch.minimum(counts, first_stop + 1)
    limited = torch.minimum(stopped, torch.minimum(limits, room).clamp(min=0))
    return limited, (limited >= limits) | ((first_stop < width) & (limited == first_stop + 1))


@op
def accept_rows(
    sampled: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    rows: Tensor,
    base: Tensor,
    max_lengths: Tensor,
    capacity: Tensor,
    stop_ids: Tensor,
    done: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What B requests emit of their own samples.

    sampled [B, R] int64, drafts [B, R - 1] int64, num_drafts [B] int64 of them offered, rows [B] int64 of the table, base [B]
    int64 the position of each request's first verifying row; the table: max_lengths, capacity [M] int64, stop_ids [M, S] int64
    (-1 unused), done [M] bool -> accepted [B] int64 (`verify`), counts [B] int64 emitted (`cut` of accepted + 1 at a stop id, at
    the length limit and at the capacity; 0 for a request that had ended), ended [B] bool (now or before), live [B] bool (not
    before).
    """
    accepted = verify.reference(sampled, drafts, num_drafts)
    limits, room = max_lengths[rows] - base - 1, capacity[rows] - base
    counts, ended = cut(sampled, accepted + 1, stop_ids[rows], limits, room)
    live = ~done[rows]
    return accepted, torch.where(live, counts, torch.zeros_like(counts)), ended | ~live, live


@op
def extend_rows(
    sampled: Tensor,
    counts: Tensor,
    row_index: Tensor,
    sampler_of: Tensor,
    offset: Tensor,
    next_ids: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the draft layer runs over the same T rows: the token after each, and where it stores.

    sampled [B, R] int64 of which counts [B] int64 are emitted, row_index [B, R] int64 (the requests' rows among T), sampler_of
    [T] int64 (the request that the row verifies for, or -1), offset [T] int64 (which of its rows), next_ids [T] int64, slots
    [T] int32 -> next_ids [T] int64 with the samples after verifying rows, slots [T] int32 with -1 for rejected rows, seed [B]
    int64: the row among T of each request's last emitted token, or of its first.
    """
    is_verifying, request = sampler_of >= 0, sampler_of.clamp(min=0)
    following = torch.where(is_verifying, sampled[request, offset], next_ids)
    is_rejected = is_verifying & (offset >= counts[request])
    stored = torch.where(is_rejected, torch.full_like(slots, -1), slots)
    seed = row_index.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    return following, stored, seed


@op
def seed_rows(hidden: Tensor, slots: Tensor, counts: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the chain of drafts begins with: the rows `seed` [B] int64 of the draft layer's hidden states [T, D] and of its
    selection, slots [T, k] and counts [T] int32 -> [B, D], [B, k] and [B].
    """
    return hidden[seed], slots[seed], counts[seed]


_ROWS, _STOPS = 17, 8


def _accept_case(requests: int, width: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        def numbers(*shape: int, low: int, high: int) -> Tensor:
            return draw.integers(*shape, low=low, high=high, dtype=torch.int64)

        sampled = numbers(requests, width, low=0, high=4)
        drafts = numbers(requests, width - 1, low=0, high=4)
        agrees = draw.uniform(requests, width - 1) < 0.8
        return (
            sampled,
            torch.where(agrees, sampled[:, :-1], drafts),
            numbers(requests, low=0, high=width),
            draw.normal(_ROWS).argsort()[:requests],
            numbers(requests, low=90, high=100),
            numbers(_ROWS, low=92, high=115),
            numbers(_ROWS, low=92, high=115),
            torch.where(draw.uniform(_ROWS, _STOPS) < 0.05, numbers(_ROWS, _STOPS, low=0, high=4), -1),
            draw.uniform(_ROWS) < 0.2,
        )

    return Case(accept_rows, f"accept_rows requests={requests} width={width}", make, EXACT, bytes=requests * width * 80)


def _extend_case(requests: int, width: int, known: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        total = known + requests * width
        row_index = known + torch.arange(requests * width, device=draw.device).view(requests, width)
        sampler_of = torch.full((total,), -1, dtype=torch.int64, device=draw.device)
        sampler_of[known:] = torch.arange(requests * width, device=draw.device) // width
        offset = torch.zeros_like(sampler_of)
        offset[known:] = torch.arange(requests * width, device=draw.device) % width
        return (
            draw.integers(requests, width, low=0, high=8192, dtype=torch.int64),
            draw.integers(requests, low=0, high=width + 1, dtype=torch.int64),
            row_index,
            sampler_of,
            offset,
            draw.integers(total, low=0, high=8192, dtype=torch.int64),
            draw.integers(total, low=-1, high=9000),
        )

    name = f"extend_rows requests={requests} width={width} known={known}"
    return Case(extend_rows, name, make, EXACT, bytes=(known + requests * width) * 44)


def _seed_case(requests: int, rows: int, hidden: int, width: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        return (
            draw.normal(rows, hidden, dtype=dtype),
            draw.integers(rows, width, low=-1, high=9000, dtype=torch.int32),
            draw.integers(rows, low=0, high=width, dtype=torch.int32),
            draw.integers(requests, low=0, high=rows, dtype=torch.int64),
        )

    name = f"seed_rows requests={requests} rows={rows} hidden={hidden} width={width} {str(dtype)[6:]}"
    return Case(seed_rows, name, make, EXACT, bytes=2 * requests * (hidden * dtype.itemsize + 4 * width + 4))


_SEED_SHAPES = (
    (1, 6, 6144, 2048, torch.bfloat16),
    (16, 96, 6144, 2048, torch.bfloat16),
    (3, 12, 256, 64, torch.float32),
    (2, 9, 20, 6, torch.float32),
)
ACCEPT_CASES = (
    *(_seed_case(*shape) for shape in _SEED_SHAPES),
    *(_accept_case(*shape) for shape in ((1, 6), (16, 6), (16, 8), (5, 1))),
    *(_extend_case(*shape) for shape in ((1, 6, 0), (16, 6, 0), (16, 8, 0), (3, 1, 0), (2, 6, 500))),
)
