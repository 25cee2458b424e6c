"""Reading and writing the device's table, row by row, and the arithmetic from position to slot.

A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.cache.layout import PAGE
from legato.ops.case import EXACT, Case, Draw
from legato.ops.op import op


@op(reference_ok=True)
def cache_slots(page_table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """slot = page_table[row, position // 64] * 64 + position % 64.

    page_table [M, P] int32 (negative: no page), rows [T] and positions [T] int32 or int64 -> slots [T] int32; -1 where
    the row or the position is negative, the position lies past the table, or there is no page.
    """
    rows, positions = rows.to(torch.int64), positions.to(torch.int64)
    known = (rows >= 0) & (positions >= 0) & (positions < page_table.shape[1] * PAGE)
    flat = torch.where(known, rows * page_table.shape[1] + positions // PAGE, 0)
    pages = page_table.reshape(-1)[flat].to(torch.int64)
    return torch.where(known & (pages >= 0), pages * PAGE + positions % PAGE, -1).to(torch.int32)


@op(reference_ok=True)
def gather_rows(tokens: Tensor, lengths: Tensor, rows: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """What decoding rows run next: the newest token (depth 0) or a draft (depth 1..K), and its position.

    tokens [M, K_max + 1] int64, lengths [M] int64 (the newest token's position), rows [T] and depth [T] int64
    -> (ids [T], positions [T]) int64. Nothing is read on the host, so lengths may be ahead of what the host knows.
    """
    return tokens[rows, depth], lengths[rows] + depth


@op
def advance_rows(
    tokens: Tensor,
    lengths: Tensor,
    done: Tensor,
    drafted: Tensor,
    rows: Tensor,
    base: Tensor,
    sampled: Tensor,
    counts: Tensor,
    ended: Tensor,
    drafts: Tensor | None,
    likely: Tensor | None,
    threshold: float,
) -> None:
    """Writes the next iteration's inputs into the table, in place.

    tokens [M, K_max + 1] int64, lengths [M] int64, done [M] bool, drafted [M] int64: the table; rows [B] int64, each once;
    base [B] int64 the position of each request's first verifying row; sampled [B, R] int64 of which counts [B] int64 are
    emitted; ended [B] bool; drafts [B, K] int64 or None; likely [B, K] float32, how likely each draft is behind those before
    it, or None. A row that emits takes its last emitted token as the newest and the drafts behind it, of which as many count
    as `drafted` as are likely together: the product of `likely` up to there is at least `threshold`. A row that emits nothing
    keeps all of it. Its length becomes base + count either way.
    """
    emits = counts > 0
    newest = sampled.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    tokens[rows, 0] = torch.where(emits, newest, tokens[rows, 0])
    made = torch.zeros_like(counts)
    if drafts is not None:
        behind = slice(1, drafts.shape[1] + 1)
        tokens[rows, behind] = torch.where(emits[:, None], drafts, tokens[rows, behind])
        made = torch.full_like(counts, drafts.shape[1])
        if likely is not None:
            made = (likely.cumprod(1) >= threshold).to(torch.int64).cumprod(1).sum(1)
    drafted[rows] = torch.where(emits, made, drafted[rows])
    lengths[rows] = base + counts
    done[rows] = ended


def _gather_case(rows: int) -> Case:
    return Case(
        gather_rows,
        f"gather_rows rows={rows}",
        lambda draw: (
            draw.integers(17, 8, low=0, high=8192),
            draw.integers(17, low=0, high=8192),
            draw.integers(rows, low=0, high=17),
            draw.integers(rows, low=0, high=8),
        ),
        EXACT,
        bytes=rows * 32,
    )


def _advance_case(num_requests: int, width: int, is_weighed: bool = False) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        def numbers(*shape: int, high: int = 8192) -> Tensor:
            return draw.integers(*shape, low=0, high=high, dtype=torch.int64)

        return (
            numbers(17, 8),
            numbers(17),
            numbers(17, high=2) == 0,
            numbers(17, high=8),
            draw.normal(17).argsort()[:num_requests],
            numbers(num_requests),
            numbers(num_requests, width),
            numbers(num_requests, high=width + 1),
            numbers(num_requests, high=2) == 0,
            numbers(num_requests, width - 1) if width > 1 else None,
            draw.uniform(num_requests, width - 1, low=0.3) if is_weighed else None,
            0.2,
        )

    name = f"advance_rows requests={num_requests} width={width}{' weighed' if is_weighed else ''}"
    return Case(advance_rows, name, make, EXACT, mutates=(0, 1, 2, 3), bytes=num_requests * (2 * width + 3) * 8)


_SLOTS = tuple(
    Case(
        cache_slots,
        f"cache_slots rows={rows}",
        lambda draw, rows=rows: (
            draw.integers(5, 7, low=-1, high=100),
            draw.integers(rows, low=-1, high=5),
            draw.integers(rows, low=-2, high=7 * PAGE + 3),
        ),
        EXACT,
        bytes=rows * 16,
    )
    for rows in (1, 6, 500)
)
TABLE_CASES = (
    *_SLOTS,
    *(_gather_case(rows) for rows in (1, 6, 96)),
    *(_advance_case(num_requests, width) for num_requests, width in ((1, 6), (16, 6), (5, 1))),
    *(_advance_case(num_requests, width, is_weighed=True) for num_requests, width in ((1, 6), (16, 8))),
)
