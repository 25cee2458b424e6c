"""Selection over keys that several ranks hold in part: each ranks its own range, and the results merge exactly.

Owns what travels between ranks and the rule of the merge. Knows no communicator: who holds the parts of all ranks calls
`merged`. Called by whoever shards contexts; the selection itself is the op `top_k`, whichever implementation is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.ops.cache.layout import PAGE
from legato.ops.select import PAGE_BITS, top_k


@dataclass(frozen=True)
class Ranked:
    """The best of one range of keys: `scores` [T, k] float32 at `positions` [T, k] int32 of the whole row, ascending, of
    which the first `counts` [T] int32 mean something. 8 k + 4 bytes a row to exchange, however long the range is."""

    scores: Tensor
    positions: Tensor
    counts: Tensor


def best_of_range(scores: Tensor, lengths: Tensor, k: int, start: int) -> Ranked:
    """The min(k, lengths[t]) best of the keys that a rank holds.

    scores [T, L] float32 of the positions `start`, start + 1 ... of every row, lengths [T] int32: how many of them row t
    has (0 where the row ends before the range). Ties go to the lowest position, as in `top_k`.
    """
    pages = -(-scores.shape[1] // PAGE)
    places = torch.arange(pages, dtype=torch.int32, device=scores.device)[None]
    row = torch.zeros(scores.shape[0], dtype=torch.int32, device=scores.device)
    chosen, counts = top_k(scores, lengths, k, places, row)
    return Ranked(scores.gather(1, chosen.clamp_min(0).to(torch.int64)), chosen + start, counts)


def merged(parts: Sequence[Ranked], page_table: Tensor, request: Tensor) -> tuple[Tensor, Tensor]:
    """(slots [T, k], counts [T]): what `top_k` returns for the whole rows, to the bit.

    parts: of all ranks, in ascending order of their ranges, made with one k; page_table [B, P] int32 of whole rows, request
    [T] int32. A part's best are the only ones of its range that can be among the best of all, and end to end the parts are
    in ascending position, so the lowest place among equal scores is the lowest position too. Raises ValueError for none.
    """
    if not parts:
        raise ValueError("merged: no parts; there is one for each rank")
    rows, k = parts[0].scores.shape
    held = torch.stack([part.counts for part in parts])
    before = held.cumsum(0, dtype=torch.int32) - held
    total = held.sum(0, dtype=torch.int32)
    width = len(parts) * k
    # One place more than there is room for takes what lies behind a part's count.
    width_and_rest = -(-(width + 1) // PAGE) * PAGE
    scores = torch.full((rows, width_and_rest), -torch.inf, device=total.device)
    positions = torch.zeros(rows, width_and_rest, dtype=torch.int32, device=total.device)
    within = torch.arange(k, dtype=torch.int32, device=total.device)
    for part, first in zip(parts, before, strict=True):
        place = torch.where(within < part.counts[:, None], first[:, None] + within, width).to(torch.int64)
        scores.scatter_(1, place, part.scores)
        positions.scatter_(1, place, part.positions)
    places = torch.arange(width_and_rest // PAGE, dtype=torch.int32, device=total.device)[None]
    chosen, counts = top_k(scores, total, k, places, torch.zeros(rows, dtype=torch.int32, device=total.device))
    at = positions.gather(1, chosen.clamp_min(0).to(torch.int64)).to(torch.int64)
    pages = page_table.index_select(0, request).to(torch.int64).gather(1, at >> PAGE_BITS)
    slots = (pages << PAGE_BITS | at & (PAGE - 1)).to(torch.int32)
    return slots.masked_fill(chosen < 0, -1), counts
