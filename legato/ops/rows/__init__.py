"""Where a row's token lies in the caches.

Owns the arithmetic from position to slot. Knows pages and positions, no requests. Called by `legato.runtime`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.cache.layout import PAGE
from legato.ops.case import EXACT, Case
from legato.ops.op import op


@op
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


CASES = tuple(
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
