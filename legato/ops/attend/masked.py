"""Attention of a prompt's rows over all tokens of their request, each row keeping to its own selection.

Owns the form in which neighbouring rows share tokens: where a request is short, most of its tokens are selected by some of
them. Knows the latent cache's layouts through `cache`. A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.cache import latent_cache, read_latent_rows
from legato.ops.cache.layout import PAGE
from legato.ops.case import BFLOAT16, EXACT, Case, Draw, Tolerance
from legato.ops.invariant import float32
from legato.ops.op import op

#: Tokens of a word of a mask, and of a unit, which has two.
WORD, UNIT = 64, 128
#: Heads of all rows that share tokens.
HEADS = 64
#: Rows of a request from which on they may share tokens.
_LEAST_ROWS = 256
#: By a row's heads: tokens that a group of rows goes through in the time of one row's own attention (H200: NOTES.md).
_TOKENS_PER_ROW = {8: 9.0, 16: 10.5, 32: 15.5}
#: Groups that run at once, so that fewer of them take as long.
_GROUPS_AT_ONCE = 124


def sharing_pays(rows: int, length: int, heads: int) -> bool:
    """Whether the last `rows` rows of a request of `length` tokens are done sooner if they share tokens: they go through all that
    is before them then, where on its own each reads what it has selected."""
    if rows < _LEAST_ROWS or heads not in _TOKENS_PER_ROW:
        return False
    seen = length - rows / 2  # by a row, on average
    return seen <= _TOKENS_PER_ROW[heads] * min(rows, _GROUPS_AT_ONCE * HEADS // heads)


@op
def mark_selected(slots: Tensor, counts: Tensor, page_places: Tensor, units: int, rows: int) -> Tensor:
    """Which tokens of a request each of its rows attends to, as bits.

    slots [T, S] int32, counts [T] int32: a selection (see `top_k`), all of one request; page_places [P] int32: which of the
    request's pages a physical page is, -1: none of them; `rows` divides T -> masks int64 [T / rows, units, 2, rows]: bit n of
    [i, u, w, r] says that row i * rows + r attends to token 128 u + 64 w + n. Tokens from 128 * units on are left out.
    """
    numbers = slots.to(torch.int64)
    valid = (torch.arange(slots.shape[1], device=slots.device) < counts.unsqueeze(1)) & (slots >= 0)
    numbers = numbers.clamp_min(0)
    places = page_places.to(torch.int64)[numbers // PAGE]
    tokens = places * PAGE + numbers % PAGE
    valid &= (places >= 0) & (tokens < units * UNIT)
    seen = torch.zeros(slots.shape[0], units * UNIT + 1, dtype=torch.bool, device=slots.device)
    seen.scatter_(1, tokens.masked_fill(~valid, units * UNIT), True)
    bits = seen[:, :-1].view(-1, rows, units, 2, WORD).permute(0, 2, 3, 1, 4).to(torch.int64)
    return (bits << torch.arange(WORD, device=slots.device)).sum(-1)


@op
def masked_mla(
    q: Tensor, cache: Tensor, tokens: Tensor, lengths: Tensor, masks: Tensor, scale: float, latent_dim: int
) -> Tensor:
    """`sparse_mla` of rows that attend to those of a request's tokens that their masks name.

    q [T, H, C+R], cache: any latent layout, tokens [L] int32 (slots of the request's tokens in order), lengths [T / r] int32 (so
    many of them count for the r = 64 / H rows of each place), masks [T / r, units, 2, r] int64 as `mark_selected` makes them,
    scale, latent_dim = C -> [T, H, C] in q's dtype. A token that counts for a place is finite, whoever attends to it. A row
    without tokens gives zeros. Source: as `sparse_mla`.
    """
    width = tokens.shape[0]
    bits = (masks.unsqueeze(-1) >> torch.arange(WORD, device=masks.device)) & 1  # [T / r, U, 2, r, 64]
    seen = bits.permute(0, 3, 1, 2, 4).flatten(2)[..., :width].bool()
    counted = torch.arange(width, device=q.device) < lengths.unsqueeze(1)
    seen = (seen & counted.unsqueeze(1)).reshape(q.shape[0], 1, width)
    read = read_latent_rows(cache, tokens.clamp_min(0).long())
    read = read.masked_fill(~seen.any(0).reshape(-1, 1), 0.0)
    scores = torch.matmul(float32(q), read.t()).mul_(scale).masked_fill_(~seen, -torch.inf)
    scores = torch.softmax(scores, dim=-1).masked_fill_(~seen, 0.0)
    return torch.matmul(scores, read[:, :latent_dim]).to(q.dtype)


def _request(draw: Draw, start: int, rows: int, width: int, pages: int) -> tuple[Tensor, ...]:
    """A request's pages among others, and a selection of `width` tokens for each of its last `rows` rows: (tokens, page_places,
    slots, counts)."""
    length = start + rows
    own = draw.distinct(pages, pages)[: -(-length // PAGE)]
    places = torch.full((pages,), -1, dtype=torch.int32, device=draw.device)
    places[own.long()] = torch.arange(own.shape[0], dtype=torch.int32, device=draw.device)
    at = torch.arange(length, device=draw.device)
    tokens = (own[at // PAGE] * PAGE + at % PAGE).to(torch.int32)
    visible = torch.arange(start + 1, length + 1, device=draw.device)
    chance = draw.uniform(rows, length).masked_fill_(at >= visible.unsqueeze(1), -1.0)
    counts = visible.clamp_max(width)
    best = chance.topk(min(width, length), dim=1).indices
    best = (
        best.masked_fill_(torch.arange(best.shape[1], device=draw.device) >= counts.unsqueeze(1), length).sort(1).values
    )
    slots = torch.where(best < length, tokens[best.clamp_max(length - 1)], -1)
    return tokens, places, slots.contiguous(), counts.to(torch.int32)


def _mark_case(start: int, rows: int, width: int, together: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        _, places, slots, counts = _request(draw, start, rows, width, (start + rows) // PAGE + 4)
        return slots, counts, places, -(-(start + rows) // UNIT), together

    return Case(
        mark_selected,
        f"mark_selected start={start} rows={rows} width={width} together={together}",
        make,
        EXACT,
        bytes=rows * (4 * width + (start + rows) // 8),
        on="gpu" if rows > 512 else "any",
    )


def _case(start: int, rows: int, heads: int, width: int, dtype: torch.dtype, cached: torch.dtype) -> Case:
    each = HEADS // heads

    def make(draw: Draw) -> tuple[Any, ...]:
        pages = (start + rows) // PAGE + 4
        tokens, places, slots, counts = _request(draw, start, rows, width, pages)
        units = -(-(start + rows) // UNIT)
        masks = mark_selected.reference(slots, counts, places, units, each)
        lengths = torch.arange(start + each, start + rows + 1, each, dtype=torch.int32, device=draw.device)
        q = draw.normal(rows, heads, 576, dtype=dtype, scale=0.5)
        return q, latent_cache(draw, cached, pages), tokens, lengths, masks, 0.0625, 512

    seen = start + rows // 2
    return Case(
        masked_mla,
        f"masked_mla start={start} rows={rows} heads={heads} width={width} {str(dtype)[6:]} cache={str(cached)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else Tolerance(1e-5, 1e-5),
        bytes=rows // each * seen * 1152 + rows * heads * 1088 * 2,
        flops=2 * rows * heads * seen * (576 + 512),
        on="gpu" if rows > 512 else "any",
    )


MASKED_CASES = (
    *(_mark_case(start, 64, 40, together) for start in (0, 70, 300) for together in (8, 4)),
    _mark_case(0, 2048, 2048, 8),
    _case(70, 16, 8, 40, torch.float32, torch.float32),
    *(
        _case(start, 64, heads, width, torch.bfloat16, torch.bfloat16)
        for start, width in ((0, 2048), (150, 100))
        for heads in (8, 16)
    ),
    _case(150, 64, 8, 100, torch.bfloat16, torch.uint8),
    *(_case(start, 1024, 8, 2048, torch.bfloat16, torch.bfloat16) for start in (0, 7168)),
    _case(7168, 1024, 8, 2048, torch.bfloat16, torch.uint8),
)
