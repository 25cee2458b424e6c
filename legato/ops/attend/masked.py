"""Attention of a prompt's rows over all tokens of their request, with keys and values of each head, each row keeping to its own
selection.

Owns the form in which rows share tokens, and when it pays: where a request is short, most of its tokens are selected by some of
them. A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.cache.layout import PAGE
from legato.ops.case import BFLOAT16, EXACT, Case, Draw, Tolerance
from legato.ops.invariant import float32
from legato.ops.op import op

#: Tokens of a word of a mask, and of a unit, which has two; rows of a place.
WORD, UNIT, PLACE = 64, 128, 8
#: Widths of a head that the kernel has: its keys without and with rotation, its values.
WIDTHS = 192, 64, 256
#: Microseconds on an H200 (NOTES.md): of a block of 128 rows of a head for each token that its last row sees; of the keys and
#: values of a token and head; of a row on its own, by heads.
_BLOCK_US, _EXPAND_US, _ALONE_US = 0.0235, 0.00075, {8: 0.29, 16: 0.345, 32: 0.5}
#: Rows of a block, and blocks at once.
_ROWS, _BLOCKS = 128, 132


def sharing_pays(rows: int, length: int, heads: int) -> bool:
    """Whether the last `rows` rows of a request of `length` tokens are done sooner if they share tokens: they go through all that
    is before them then, where on its own each reads what it has selected."""
    if heads not in _ALONE_US:
        return False
    blocks, seen = -(-rows // _ROWS) * heads, length - rows / 2
    together = _BLOCK_US * max(length, seen * blocks / _BLOCKS) + _EXPAND_US * length * heads
    return together < _ALONE_US[heads] * rows


def place_lengths(lengths: Tensor) -> Tensor:
    """Of the last row of each place, for rows [T] whose lengths ascend."""
    ends = lengths[PLACE - 1 :: PLACE]
    return ends.contiguous() if lengths.shape[0] % PLACE == 0 else torch.cat((ends, lengths[-1:]))


@op
def mark_selected(slots: Tensor, counts: Tensor, page_places: Tensor, units: int) -> Tensor:
    """Which tokens of a request each of its rows attends to, as bits.

    slots [T, S] int32, counts [T] int32: a selection (see `top_k`), all of one request; page_places [P] int32: which of the
    request's pages a physical page is, -1: none of them -> masks int64 [ceil(T / 8), units, 2, 8]: bit n of [i, u, w, r] says
    that row 8 i + r attends to token 128 u + 64 w + n. Tokens from 128 * units on are left out; rows beyond the last attend to
    none.
    """
    numbers = slots.to(torch.int64)
    valid = (torch.arange(slots.shape[1], device=slots.device) < counts.unsqueeze(1)) & (slots >= 0)
    numbers = numbers.clamp_min(0)
    places = page_places.to(torch.int64)[numbers // PAGE]
    tokens = places * PAGE + numbers % PAGE
    valid &= (places >= 0) & (tokens < units * UNIT)
    rows = -(-slots.shape[0] // PLACE) * PLACE
    seen = torch.zeros(rows, units * UNIT + 1, dtype=torch.bool, device=slots.device)
    seen[: slots.shape[0]].scatter_(1, tokens.masked_fill(~valid, units * UNIT), True)
    bits = seen[:, :-1].view(-1, PLACE, units, 2, WORD).permute(0, 2, 3, 1, 4).to(torch.int64)
    return (bits << torch.arange(WORD, device=slots.device)).sum(-1)


@op
def masked_mha(q: Tensor, kv: Tensor, rope: Tensor, lengths: Tensor, masks: Tensor, scale: float) -> Tensor:
    """Attention of rows to those of a request's tokens that their masks name, with keys and values of each head.

    out[t, h] = sum over j of softmax_j(scale * q[t, h] . k_j,h) * v_j,h over the tokens j that row t's mask names, with k_j,h =
    [kv[j, h, :N] ; rope_j] and v_j,h = kv[j, h, N:].

    q [T, H, N+R] (rope part rotated), kv [L, H, N+V], rope [L, R] (both finite: a request's tokens in order), lengths
    [ceil(T / 8)] int32, ascending (so many tokens count for the rows of each place), masks [ceil(T / 8), units, 2, 8] int64 as
    `mark_selected` makes them, whose units cover L -> [T, H, V] in q's dtype. A row without tokens gives zeros.
    Source: arXiv:2405.04434, section 2.1.
    """
    rows, nope, width = q.shape[0], q.shape[2] - rope.shape[1], kv.shape[0]
    bits = (masks.unsqueeze(-1) >> torch.arange(WORD, device=masks.device)) & 1  # [T / 8, U, 2, 8, 64]
    seen = bits.permute(0, 3, 1, 2, 4).flatten(2)[..., :width].bool()
    counted = torch.arange(width, device=masks.device) < lengths.unsqueeze(1)
    seen = (seen & counted.unsqueeze(1)).flatten(0, 1)[:rows]
    keys = torch.cat((kv[..., :nope], rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), dim=-1)
    scores = torch.matmul(float32(q).transpose(0, 1), float32(keys).permute(1, 2, 0)).mul_(scale)
    scores = torch.softmax(scores.masked_fill_(~seen, -torch.inf), dim=-1).masked_fill_(~seen, 0.0)
    return torch.matmul(scores, float32(kv[..., nope:]).transpose(0, 1)).transpose(0, 1).to(q.dtype).contiguous()


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


def _mark_case(start: int, rows: int, width: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        _, places, slots, counts = _request(draw, start, rows, width, (start + rows) // PAGE + 4)
        return slots, counts, places, -(-(start + rows) // UNIT)

    return Case(
        mark_selected,
        f"mark_selected start={start} rows={rows} width={width}",
        make,
        EXACT,
        bytes=rows * (4 * width + (start + rows) // 8),
        on="gpu" if rows > 512 else "any",
    )


def _case(start: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> Case:
    length = start + rows

    def make(draw: Draw) -> tuple[Any, ...]:
        _, places, slots, counts = _request(draw, start, rows, width, length // PAGE + 4)
        masks = mark_selected.reference(slots, counts, places, -(-length // UNIT))
        lengths = place_lengths(torch.arange(start + 1, length + 1, dtype=torch.int32, device=draw.device))
        q, kv = draw.normal(rows, heads, 256, dtype=dtype), draw.normal(length, heads, 448, dtype=dtype)
        return q, kv, draw.normal(length, 576, dtype=dtype)[:, 512:], lengths, masks, 0.0625

    seen = start + rows // 2
    return Case(
        masked_mha,
        f"masked_mha start={start} rows={rows} heads={heads} width={width} {str(dtype)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else Tolerance(1e-5, 1e-5),
        bytes=heads * (length * 448 + rows * 512) * 2 + rows * length // 8,
        flops=2 * rows * heads * seen * 512,
        on="gpu" if rows > 512 else "any",
    )


_SMALL = ((0, 64, 2, 2048), (150, 61, 3, 100), (3, 297, 1, 64), (400, 136, 1, 300))
MASKED_CASES = (
    *(_mark_case(start, rows, 40) for start, rows in ((0, 64), (70, 61), (300, 66))),
    _mark_case(0, 2048, 2048),
    _case(70, 13, 2, 40, torch.float32),
    *(_case(*shape, torch.bfloat16) for shape in _SMALL),
    *(_case(start, rows, 8, 2048, torch.bfloat16) for start, rows in ((7168, 1024), (0, 2048))),
)
