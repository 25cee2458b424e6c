"""Which earlier tokens a row will attend to: the k best scores, as slots of the cache.

Owns the exact selection rule and its ties. Called by `legato.model` on full layers; shared layers reuse its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.cache.layout import PAGE
from legato.ops.case import EXACT, Case, Draw, Where
from legato.ops.op import op
from legato.ops.select.ordering import BELOW_ALL, first_k, ordered_keys

PAGE_BITS = PAGE.bit_length() - 1


@op
def top_k(scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor) -> tuple[Tensor, Tensor]:
    """The min(k, lengths[t]) highest-scoring positions of each row, in ascending order, as physical slots.

    scores [T, L] float32, lengths [T] int32 (<= L; positions beyond are not looked at), k >= 1, page_table [B, P] int32
    with 64 P >= L, request [T] int32 (a row of page_table) -> (slots [T, k] int32 = page * 64 + offset, -1 beyond the
    count; counts [T] int32). Equal scores go to the lowest position; -0.0 equals +0.0; NaN ranks below -inf (and NaNs
    equal each other); subnormals count as what they are. A row no longer than k gets all its positions, whatever its
    scores. So the result is a function of the scores alone, to the bit. Source: arXiv:2512.02556 (top-k selector of
    DeepSeek sparse attention); the tie rule is ours.
    """
    counts = lengths.clamp_max(k).to(torch.int32)
    width = min(k, scores.shape[1])
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest <= k:
        positions = torch.arange(width, device=scores.device).expand(scores.shape[0], width)
    else:
        visible = scores[:, :longest]
        beyond = torch.arange(longest, device=scores.device) >= lengths.unsqueeze(1)
        # Positions beyond a row's length are last in the order and last in position: after the sort they follow the
        # row's own.
        positions = first_k(ordered_keys(visible).masked_fill_(beyond, BELOW_ALL), width).sort(1).values
    pages = page_table.index_select(0, request).to(torch.int64).gather(1, positions >> PAGE_BITS)
    slots = (pages << PAGE_BITS) | (positions & (PAGE - 1))
    slots = slots.masked_fill(torch.arange(width, device=scores.device) >= counts.unsqueeze(1), -1).to(torch.int32)
    return (slots if width == k else functional.pad(slots, (0, k - width), value=-1)), counts


def _case(rows: int, k: int, longest: int, ties: int, on: Where = "any") -> Case:
    """Scores with about `ties` equal values each (the ReLU sum makes exact zeros common), rows of staggered lengths."""
    pages = -(-longest // PAGE)

    def make(draw: Draw) -> tuple[Any, ...]:
        scores = draw.normal(rows, pages * PAGE)
        if ties > 1:
            scores = (scores * (longest / ties / 8)).round() / 16
        lengths = longest - torch.arange(rows, dtype=torch.int32, device=draw.device)
        table = draw.distinct(2 * pages, 2 * pages).view(2, pages)
        return scores, lengths.clamp_min(0), k, table, draw.integers(rows, low=0, high=2)

    name = f"top_k rows={rows} k={k} length={longest} ties={ties}"
    return Case(top_k, name, make, EXACT, bytes=rows * (longest * 4 + k * 8), on=on)


CASES = (
    *(_case(rows, 256, longest, ties) for rows in (1, 6) for longest in (100, 256, 257, 1000) for ties in (1, 20)),
    _case(6, 64, 67, 4),
    _case(1, 2048, 4096, 1),
    *(_case(6, 2048, longest, ties, "gpu") for longest in (4096, 32768, 131072) for ties in (1, 3000)),
)
