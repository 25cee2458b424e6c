"""Writing tokens into the paged caches, and reading them back as numbers.

Owns what a store and a gather mean; the byte layouts are in `layout.py`. A slot is page * 64 + offset; a negative slot
is no token. Knows no request and no page table. Called by `legato.model`; the gathers also by the references of
`attend` and `score`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.cache.layout import (
    INDEX_PAGE_BYTES,
    INDEX_WIDTH,
    LATENT_BYTES,
    LATENT_GROUP,
    LATENT_ROPE,
    LATENT_WIDTH,
    PAGE,
    check_index_cache,
    check_latent_cache,
    e4m3_to_float,
    index_page_views,
    latent_row_width,
    quantize_groups,
)
from legato.ops.case import EXACT, Case, Draw
from legato.ops.op import op


@op(reference_ok=True)
def store_latent(cache: Tensor, latent: Tensor, rope_key: Tensor, slots: Tensor) -> None:
    """Write one latent and its rope key per row at `slots`; rows with a negative slot are skipped. Slots of a call are
    distinct.

    cache: any latent layout, written in place; latent [T, C] (normalised), rope_key [T, R] (rotated), slots [T] int32
    or int64. The uint8 layout rounds the latent to e4m3 with one power-of-two scale per 128 and the rope key to
    bfloat16. Raises ValueError for a layout that does not fit. Source: the "ds_mla" cache of FlashMLA.
    """
    check_latent_cache(cache, latent.shape[-1] + rope_key.shape[-1])
    if cache.dtype == torch.uint8:
        codes, scales = quantize_groups(latent.to(torch.float32).unflatten(-1, (-1, LATENT_GROUP)))
        rope = rope_key.to(torch.bfloat16).contiguous()
        parts = (codes.flatten(-2).view(torch.uint8), scales.flatten(-2).view(torch.uint8), rope.view(torch.uint8))
        rows = torch.cat(parts, dim=-1)
    else:
        rows = torch.cat((latent.to(cache.dtype), rope_key.to(cache.dtype)), dim=-1)
    _store_rows(cache.view(-1, cache.shape[-1]), rows, slots)


def _store_rows(flat: Tensor, rows: Tensor, slots: Tensor) -> None:
    if slots.device.type != "cpu":
        rows, slots = _repeated(flat[:1], rows, slots)
        flat.index_copy_(0, slots, rows)
        return
    kept = slots >= 0
    if not bool(kept.all()):
        rows, slots = rows[kept], slots[kept]
    flat.index_copy_(0, slots.to(torch.int64), rows)


def _repeated(held: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, slots int64) in which what is skipped repeats the first row that is not, or else `held`, what slot 0 holds.

    Nothing is read on the host and all writes to a slot are equal, so a captured graph may hold it.
    """
    if not rows.shape[0]:
        return rows, slots.to(torch.int64)
    kept = slots >= 0
    first = kept.to(torch.int32).argmax(0, keepdim=True)
    anchor = slots[first].clamp_min(0).to(torch.int64)
    instead = torch.where(kept.any(), rows[first], held)
    return torch.where(kept.unsqueeze(1), rows, instead), torch.where(kept, slots.to(torch.int64), anchor)


@op(reference_ok=True)
def gather_latent(cache: Tensor, slots: Tensor) -> Tensor:
    """The latents and rope keys at `slots`, as numbers: float32 [..., C+R]. Negative slots give zeros.

    cache: any latent layout; slots [...] int32 or int64. Raises ValueError for an unknown layout.
    """
    flat = slots.reshape(-1).to(torch.int64)
    rows = read_latent_rows(cache, flat.clamp_min(0))
    rows = rows.masked_fill_((flat < 0).unsqueeze(-1), 0.0) if rows.shape[0] else rows
    return rows.view(*slots.shape, rows.shape[-1])


def read_latent_rows(cache: Tensor, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same for a flat list of valid slots [n] int64 -> [n, C+R] in `dtype`; a plain function that `attend` and the model
    share."""
    check_latent_cache(cache, latent_row_width(cache))
    rows = cache.view(-1, cache.shape[-1]).index_select(0, slots)
    if cache.dtype != torch.uint8:
        return rows.to(dtype)
    codes = rows[:, :LATENT_WIDTH].unflatten(1, (-1, LATENT_GROUP))
    scales = rows[:, LATENT_WIDTH : LATENT_BYTES - 2 * LATENT_ROPE].view(torch.float32).unsqueeze(-1)
    latent = (e4m3_to_float(codes.view(torch.float8_e4m3fn)) * scales).flatten(1)
    rope = rows[:, LATENT_BYTES - 2 * LATENT_ROPE :].view(torch.bfloat16)
    return torch.cat((latent.to(dtype), rope.to(dtype)), dim=-1)


@op(reference_ok=True)
def store_index_keys(cache: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Write one indexer key per row at `slots`; rows with a negative slot are skipped. Slots of a call are distinct.

    cache: any index layout, written in place; keys [T, X] (normalised and rotated), slots [T] int32 or int64.
    The uint8 layout rounds a key to e4m3 with one power-of-two scale over its 128 numbers.
    Raises ValueError for a layout that does not fit. Source: the index-K cache of DeepSeek-V3.2.
    """
    check_index_cache(cache, keys.shape[-1])
    keys = keys.to(torch.float32)
    if cache.dtype == torch.float32:
        _store_rows(cache.view(-1, keys.shape[-1]), keys, slots)
        return
    codes, scales = quantize_groups(keys)
    stored_keys, stored_scales = index_page_views(cache)
    stored_keys = stored_keys.view(torch.uint8)
    rows = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)
    if slots.device.type == "cpu":
        kept = slots >= 0
        if not bool(kept.all()):
            rows, slots = rows[kept], slots[kept]
        slots = slots.to(torch.int64)
    else:
        held = torch.cat((stored_keys[0, :1], stored_scales[0, :1, None].view(torch.uint8)), dim=-1)
        rows, slots = _repeated(held, rows, slots)
    pages, offsets = slots // PAGE, slots % PAGE
    stored_keys[pages, offsets] = rows[:, :INDEX_WIDTH]
    stored_scales[pages, offsets] = rows[:, INDEX_WIDTH:].contiguous().view(torch.float32)[:, 0]


@op(reference_ok=True)
def gather_index_pages(cache: Tensor, page_ids: Tensor) -> Tensor:
    """Whole pages of indexer keys, as numbers: float32 [..., 64, X]. Negative page ids give zeros.

    cache: any index layout; page_ids [...] int32 or int64. Raises ValueError for an unknown layout.
    """
    check_index_cache(cache, 128 if cache.dtype == torch.uint8 else cache.shape[-1])
    flat = page_ids.reshape(-1).to(torch.int64)
    pages = cache.index_select(0, flat.clamp_min(0))
    if cache.dtype == torch.uint8:
        codes, scales = index_page_views(pages.view(-1, INDEX_PAGE_BYTES))
        pages = e4m3_to_float(codes).mul_(scales.unsqueeze(-1))
    # A GPU would have to be waited for, to know.
    if flat.device.type != "cpu" or bool((flat < 0).any()):
        pages = pages.masked_fill((flat < 0).view(-1, 1, 1), 0.0)
    return pages.view(*page_ids.shape, *pages.shape[1:])


_PAGES = 6


def latent_cache(draw: Draw, dtype: torch.dtype, pages: int = _PAGES) -> Tensor:
    """A latent cache of some pages, 512 + 64 wide, filled with tokens; for cases here, in `prologue` and in `attend`."""
    width = LATENT_BYTES if dtype == torch.uint8 else LATENT_WIDTH + LATENT_ROPE
    cache = torch.zeros(pages, PAGE, width, dtype=dtype, device=draw.device)
    tokens = draw.normal(pages * PAGE, LATENT_WIDTH), draw.normal(pages * PAGE, LATENT_ROPE)
    store_latent.reference(cache, *tokens, torch.arange(pages * PAGE, device=draw.device))
    return cache


def index_cache(draw: Draw, dtype: torch.dtype, pages: int = _PAGES) -> Tensor:
    """An index cache of some pages of 64 keys of 128, filled; for cases here and in `score`."""
    shape = (INDEX_PAGE_BYTES,) if dtype == torch.uint8 else (PAGE, INDEX_WIDTH)
    cache = torch.zeros(pages, *shape, dtype=dtype, device=draw.device)
    keys = draw.normal(pages * PAGE, INDEX_WIDTH)
    store_index_keys.reference(cache, keys, torch.arange(pages * PAGE, device=draw.device))
    return cache


def _some_skipped(draw: Draw, rows: int) -> Tensor:
    slots = draw.distinct(rows, _PAGES * PAGE)
    return slots.masked_fill_(torch.arange(rows, device=draw.device) % 5 == 3, -1)


def _store_latent_case(rows: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        # Rows of very different sizes, and one of zeros, so that the scales differ.
        sizes = 10.0 ** draw.integers(rows, 1, low=-3, high=3).to(torch.float32)
        latent = draw.normal(rows, LATENT_WIDTH) * sizes
        latent[0] = 0
        return latent_cache(draw, dtype), latent, draw.normal(rows, LATENT_ROPE), _some_skipped(draw, rows)

    name = f"store_latent rows={rows} {str(dtype)[6:]}"
    return Case(store_latent, name, make, EXACT, mutates=(0,), bytes=rows * (576 * 4 + LATENT_BYTES))


def _store_keys_case(rows: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        keys = draw.normal(rows, INDEX_WIDTH) * 10.0 ** draw.integers(rows, 1, low=-3, high=3).to(torch.float32)
        return index_cache(draw, dtype), keys, _some_skipped(draw, rows)

    name = f"store_index_keys rows={rows} {str(dtype)[6:]}"
    return Case(store_index_keys, name, make, EXACT, mutates=(0,), bytes=rows * (INDEX_WIDTH * 5 + 4))


_LATENT_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
_INDEX_DTYPES = (torch.float32, torch.uint8)
CASES = (
    *(_store_latent_case(rows, dtype) for rows in (1, 6, 37) for dtype in _LATENT_DTYPES),
    *(_store_keys_case(rows, dtype) for rows in (1, 6, 37) for dtype in _INDEX_DTYPES),
    *(
        Case(
            gather_latent,
            f"gather_latent {str(dtype)[6:]}",
            lambda draw, dtype=dtype: (latent_cache(draw, dtype), draw.integers(3, 40, low=-9, high=_PAGES * PAGE)),
            EXACT,
        )
        for dtype in _LATENT_DTYPES
    ),
    *(
        Case(
            gather_index_pages,
            f"gather_index_pages {str(dtype)[6:]}",
            lambda draw, dtype=dtype: (index_cache(draw, dtype), draw.integers(2, 5, low=-1, high=_PAGES)),
            EXACT,
        )
        for dtype in _INDEX_DTYPES
    ),
)
