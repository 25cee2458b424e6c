# pyright: basic
"""Attention of a prompt's rows over all tokens of their request on Hopper: `sparse_mla_many.cu` with a mask for each row.

Owns the launches of it and of `mark_selected.cu`. Must not read a tensor's values. Imported by `sm90.py` only.
"""

from __future__ import annotations

import math
from functools import cache as cached
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.attend import mark_selected, masked_mla
from legato.ops.attend.masked import HEADS
from legato.ops.attend.sm90_forms import MOST_BYTES, Form
from legato.ops.build import Kernel, Launch, Source
from legato.ops.cache import read_latent_rows
from legato.ops.cache.layout import LATENT_ROPE, LATENT_WIDTH, PAGE
from legato.ops.strides import dense, is_dense

_WIDTH = LATENT_WIDTH + LATENT_ROPE
_FORM = Form(HEADS, False)
_MARK = Path(__file__).with_name("mark_selected.cu")
#: Most shared memory of a block that marks: 16 bytes for each unit and row.
_MARK_BYTES = 128 * 1024


@cached
def kernel(heads: int) -> Kernel:
    """The kernel for rows of so many heads."""
    source = Source(_FORM.source.path, {**_FORM.source.defines, "ROW_HEADS": heads})
    return Kernel(source, "sparse_mla", shared_bytes=MOST_BYTES, non_portable_cluster=True)


@cached
def mark_kernel(rows: int) -> Kernel:
    """The kernel for so many rows that share tokens."""
    return Kernel(Source(_MARK, {"ROWS": rows}), "mark_selected", shared_bytes=_MARK_BYTES)


@mark_selected.on("sm90")
def run_mark(slots: Tensor, counts: Tensor, page_places: Tensor, units: int, rows: int) -> Tensor:
    """The kernel where the masks of a place fit a multiprocessor, otherwise the reference."""
    shared = 16 * units * rows
    fits = shared <= _MARK_BYTES and slots.stride(1) == 1
    if not fits or slots.dtype != torch.int32 or counts.dtype != torch.int32 or page_places.dtype != torch.int32:
        return mark_selected.reference(slots, counts, page_places, units, rows)
    places = slots.shape[0] // rows
    masks = torch.empty(places, units, 2, rows, dtype=torch.int64, device=slots.device)
    if places:
        how = Launch(grid=(places,), block=(256,), shared_bytes=shared, programmatic=True)
        mark_kernel(rows)(how, slots, counts.contiguous(), page_places.contiguous(), slots.stride(0), units, masks)
    return masks


def _widened(cache: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of an FP8 cache as a bfloat16 cache of their own, in order: hundreds of rows read each of them."""
    rows = read_latent_rows(cache, tokens.long()).to(torch.bfloat16)
    pages = -(-rows.shape[0] // PAGE)
    rows = torch.constant_pad_nd(rows, (0, 0, 0, pages * PAGE - rows.shape[0]))
    return rows.view(pages, PAGE, -1), torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)


@masked_mla.on("sm90")
def run_masked(
    q: Tensor, cache: Tensor, tokens: Tensor, lengths: Tensor, masks: Tensor, scale: float, latent_dim: int
) -> Tensor:
    """bfloat16 queries of 8, 16 or 32 heads on a bfloat16 or 656-byte cache of 512 + 64: the kernel; otherwise the reference."""
    rows, heads, width = q.shape
    if cache.dtype == torch.uint8 and q.dtype == torch.bfloat16:
        cache, tokens = _widened(cache, tokens)
    shape = heads in (8, 16, 32) and (latent_dim, width) == (LATENT_WIDTH, _WIDTH) and is_dense(cache)
    types = q.dtype, cache.dtype, tokens.dtype, masks.dtype
    if not shape or types != (torch.bfloat16, torch.bfloat16, torch.int32, torch.int64):
        return masked_mla.reference(q, cache, tokens, lengths, masks, scale, latent_dim)
    out = torch.empty(rows, heads, latent_dim, dtype=q.dtype, device=q.device)
    if rows:
        # The rows of a place lie one behind the other, as heads of one row.
        how = Launch(
            grid=(rows * heads // HEADS, 1), block=(_FORM.threads,), shared_bytes=_FORM.fixed_bytes, programmatic=True
        )
        kernel(heads)(
            how, dense(q), cache, tokens.contiguous(), lengths.to(torch.int32).contiguous(), out, HEADS, tokens.shape[0], 0,
            HEADS * width, scale / math.log(2), dense(masks), masks.shape[1],
        )  # fmt: skip
    return out
