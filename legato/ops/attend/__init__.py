"""Attention of each row over its selected tokens, in latent space.

Owns sparse multi-head latent attention in its two equal forms. Knows the latent cache's layouts through `cache`,
nothing of how the selection was made. Called by `legato.model` on every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.attend.masked import MASKED_CASES, mark_selected, masked_mha
from legato.ops.cache import latent_cache, read_latent_rows
from legato.ops.cache.layout import LATENT_BYTES, PAGE, latent_row_width
from legato.ops.case import BFLOAT16, Case, Draw, Tolerance
from legato.ops.invariant import float32
from legato.ops.op import op

__all__ = ["CASES", "mark_selected", "masked_mha", "sparse_mha", "sparse_mla"]

#: Tokens gathered at a time: 16384 rows of 576 float32 are 36 MiB.
_GATHER_TILE = 16384
#: Entries of a selection are computed in multiples of this.
_WIDTH_BLOCK = 64


@op
def sparse_mla(
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    latent_dim: int,
    stored: Tensor | None = None,
) -> Tensor:
    """Absorbed attention: out[t, h] = sum over j of softmax_j(scale * q[t, h] . [latent_j ; rope_j]) * latent_j.

    q [T, H, C+R] (the query already in latent space, then its rotated rope part), cache: any latent layout, slots [T,
    S] int32, counts [T] int32, scale = (N + R)^-0.5, latent_dim = C -> [T, H, C] in q's dtype, accumulated in float32.
    Only the first counts[t] entries of a row count, and of those only slots >= 0; what lies at any other slot, NaN
    included, changes nothing. A row without tokens gives zeros. Raises ValueError for an unknown cache layout.
    `stored` [n] int32 is a promise that changes no result: everything but q and the tokens at these slots (-1: none) was
    complete when the op before this one was launched on the device, so that an implementation may read it while that op
    still runs. None promises nothing.
    Source: arXiv:2405.04434 (MLA), arXiv:2512.02556 (sparse selection).
    """
    queries = float32(q)
    out = torch.zeros(*q.shape[:2], latent_dim, device=q.device)
    for rows, width in _tiles(slots, counts):
        tokens, mask, empty = _selected(cache, slots[rows, :width], counts[rows])
        probabilities = _probabilities(torch.bmm(queries[rows], tokens.transpose(1, 2)), mask, scale)
        out[rows] = torch.bmm(probabilities, tokens[..., :latent_dim]).masked_fill_(empty, 0.0)
    return out.to(q.dtype)


@op(reference_ok=True)
def sparse_mha(q: Tensor, kv_b: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float) -> Tensor:
    """The same attention with keys and values expanded out of the latent.

    out[t, h] = sum over j of softmax_j(scale * q[t, h] . k_j,h) * v_j,h with k_j,h = [kv_b[h, :N] latent_j ; rope_j] and
    v_j,h = kv_b[h, N:] latent_j. q [T, H, N+R] (rope part rotated), kv_b [H, N+V, C] (N rows for keys, then V for values),
    cache, slots, counts and scale as in `sparse_mla` -> [T, H, V] in q's dtype.
    Equal to the absorbed form in exact arithmetic, which is tested against it. Source: arXiv:2405.04434.
    """
    queries, expand = q.to(torch.float32), kv_b.to(torch.float32)
    latent_dim = expand.shape[-1]
    nope_dim = q.shape[-1] - (latent_row_width(cache) - latent_dim)
    out = torch.zeros(*q.shape[:2], expand.shape[1] - nope_dim, device=q.device)
    for rows, width in _tiles(slots, counts):
        tokens, mask, empty = _selected(cache, slots[rows, :width], counts[rows])
        expanded = torch.matmul(tokens[:, None, :, :latent_dim], expand.transpose(1, 2))
        rope = tokens[:, None, :, latent_dim:].expand(-1, q.shape[1], -1, -1)
        keys = torch.cat((expanded[..., :nope_dim], rope), dim=-1)
        scores = torch.matmul(queries[rows].unsqueeze(2), keys.transpose(2, 3)).squeeze(2)
        probabilities = _probabilities(scores, mask, scale)
        values = torch.matmul(probabilities.unsqueeze(2), expanded[..., nope_dim:]).squeeze(2)
        out[rows] = values.masked_fill_(empty, 0.0)
    return out.to(q.dtype)


def _tiles(slots: Tensor, counts: Tensor) -> list[tuple[slice, int]]:
    """Neighbouring rows that are computed together, and how many entries of each.

    On a CPU a row is cut at the next multiple of 64 from its own count, never from another row's: the width is part of
    what decides its bits.
    """
    num_rows, most = slots.shape
    if slots.device.type == "cpu":
        widths = [min(most, max(1, -(-count // _WIDTH_BLOCK)) * _WIDTH_BLOCK) for count in counts.tolist()]
    else:
        widths = [most] * num_rows
    tiles: list[tuple[slice, int]] = []
    first = 0
    for row in range(1, num_rows + 1):
        full = (row - first) * widths[first] >= _GATHER_TILE
        if row == num_rows or widths[row] != widths[first] or full:
            tiles.append((slice(first, row), widths[first]))
            first = row
    return tiles


def _selected(cache: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> (tokens [t, S, C+R], True at entries that do not count [t, 1, S], True for rows without any that does [t, 1, 1]).

    An entry that does not count reads a token of its own row that does: no stray number gets in, a NaN least of all.
    """
    beyond = torch.arange(slots.shape[1], device=slots.device) >= counts.unsqueeze(1)
    counted = slots.masked_fill(beyond, -1)
    mask = counted < 0
    stand_in = counted.amax(1, keepdim=True)
    filled = torch.where(mask, stand_in.clamp_min(0), counted)
    tokens = _shared_tokens(cache, filled, mask, counts)
    if tokens is None:
        tokens = read_latent_rows(cache, filled.reshape(-1)).view(*slots.shape, -1)
    return tokens, mask.unsqueeze(1), (stand_in < 0).unsqueeze(1)


def _shared_tokens(cache: Tensor, filled: Tensor, mask: Tensor, counts: Tensor) -> Tensor | None:
    """The tokens [t, S, C+R] as one gathered row, where every row's selection is a beginning of the longest one's.

    So it is while a request is no longer than the selection is wide. Then an entry that does not count reads a token of
    the longest row, which is harmless if that is finite: its probability is exactly zero.
    """
    if filled.device.type != "cpu" or filled.shape[0] == 1:
        return None
    longest = filled[int(counts.argmax())]
    if not bool((mask | (filled == longest)).all()):
        return None
    tokens = read_latent_rows(cache, longest)
    return tokens.expand(filled.shape[0], -1, -1) if bool(tokens.sum().isfinite()) else None


def _probabilities(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax(scores.mul_(scale).masked_fill_(mask, -torch.inf), dim=-1)


def _selection(draw: Draw, cache: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Slots with a random share of each row counted, one row with none, and -1 both inside and beyond the count."""
    slots = draw.integers(rows, width, low=-1, high=cache.shape[0] * cache.shape[1])
    counts = draw.integers(rows, low=1, high=width + 1)
    counts[rows // 2] = 0 if rows > 1 else width
    return slots, counts


def _absorbed_case(rows: int, heads: int, width: int, dtype: torch.dtype, cached: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        cache = latent_cache(draw, cached)
        slots, counts = _selection(draw, cache, rows, width)
        return draw.normal(rows, heads, 576, dtype=dtype, scale=0.5), cache, slots, counts, 0.0625, 512

    token_bytes = LATENT_BYTES if cached == torch.uint8 else 576 * cached.itemsize
    return Case(
        sparse_mla,
        f"sparse_mla rows={rows} heads={heads} width={width} {str(dtype)[6:]} cache={str(cached)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else Tolerance(1e-5, 1e-5),
        bytes=rows * (width * token_bytes + heads * 1088 * dtype.itemsize),
        flops=2 * rows * heads * width * (576 + 512),
    )


def _production_case(rows: int, heads: int, cached: torch.dtype, pages: int) -> Case:
    """2048 tokens a row out of so many pages: rows that share no token where these are enough for that."""
    disjoint = pages * PAGE >= rows * 2048

    def make(draw: Draw) -> tuple[Any, ...]:
        cache = latent_cache(draw, cached, pages)
        if disjoint:
            slots = draw.distinct(rows * 2048, pages * PAGE).view(rows, 2048)
        else:
            slots = torch.stack([draw.distinct(2048, pages * PAGE) for _ in range(rows)])
        counts = torch.full((rows,), 2048, dtype=torch.int32, device=draw.device)
        return draw.normal(rows, heads, 576, dtype=torch.bfloat16, scale=0.5), cache, slots, counts, 0.0625, 512

    token_bytes = LATENT_BYTES if cached == torch.uint8 else 576 * cached.itemsize
    return Case(
        sparse_mla,
        f"sparse_mla rows={rows} heads={heads} width=2048 pages={pages} cache={str(cached)[6:]}",
        make,
        BFLOAT16,
        cold=(1,),  # the queries and, where this layer chose, the selection were written a moment ago
        bytes=pages * PAGE * token_bytes + rows * (2048 * 4 + heads * 1088 * 2),
        flops=2 * rows * heads * 2048 * (576 + 512),
        on="gpu",
    )


def _expanded_case(rows: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        cache = latent_cache(draw, torch.float32)
        slots, counts = _selection(draw, cache, rows, 64)
        kv_b = draw.normal(4, 64 + 48, 512, scale=512**-0.5)
        return draw.normal(rows, 4, 64 + 64), kv_b, cache, slots, counts, 128**-0.5

    return Case(sparse_mha, f"sparse_mha rows={rows} heads=4 width=64", make, Tolerance(1e-5, 1e-5))


CASES = (
    *(
        _absorbed_case(rows, 4, 128, torch.float32, cached)
        for rows in (1, 6, 9)
        for cached in (torch.float32, torch.bfloat16, torch.uint8)
    ),
    *(
        _absorbed_case(rows, 8, 2048, torch.bfloat16, cached)
        for rows in (1, 6)
        for cached in (torch.bfloat16, torch.uint8)
    ),
    *(
        _production_case(rows, heads, cached, pages=rows * 32)
        for heads in (8, 64)
        for rows in (1, 6, 16, 36)
        for cached in (torch.bfloat16, torch.uint8)
    ),
    *(
        _production_case(rows, heads, cached, pages)
        for rows, pages in ((6, 44), (2048, 512))  # one request's rows, which share most; a chunk of a prefill at 32768
        for heads in (8, 64)
        for cached in (torch.bfloat16, torch.uint8)
    ),
    *(_expanded_case(rows) for rows in (1, 6)),
    *MASKED_CASES,
)
