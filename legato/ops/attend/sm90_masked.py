# pyright: basic
"""Attention of a prompt's rows over all tokens of their request on Hopper: `masked_mha.cu`, and the marks it keeps to.

Owns the launches of it and of `mark_selected.cu`. Must not read a tensor's values. Imported by `sm90.py` only.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.attend import mark_selected, masked_mha
from legato.ops.attend.masked import PLACE, UNIT, WIDTHS
from legato.ops.build import Kernel, Launch, Source, TensorMaps
from legato.ops.strides import dense, in_rows

_FOLDER = Path(__file__).parent
#: Most shared memory of a block that marks: 16 bytes for each unit and row.
_MARK_BYTES = 128 * 1024
MARK = Kernel(Source(_FOLDER / "mark_selected.cu", {"ROWS": PLACE}), "mark_selected", shared_bytes=_MARK_BYTES)
#: Of `masked_mha.cu`: numbers of a column; rows of a block, tokens of a piece of values, threads; its shared memory: queries, ten
#: pieces of 16 KB, barriers.
_COLUMN, _ROWS, _VALUE_TOKENS, _THREADS = 64, 128, 32, 384
_NOPE, _ROPE, _VALUE = WIDTHS
_SHARED_BYTES = 2 * _ROWS * (_NOPE + _ROPE) + 10 * (16384 + 16) + 8
MHA = Kernel(
    Source(_FOLDER / "masked_mha.cu", {"SHARED_BYTES": _SHARED_BYTES}), "masked_mha", shared_bytes=_SHARED_BYTES
)


@mark_selected.on("sm90")
def run_mark(slots: Tensor, counts: Tensor, page_places: Tensor, units: int) -> Tensor:
    """The kernel where the masks of a place fit a multiprocessor, otherwise the reference."""
    shared, rows = 16 * units * PLACE, slots.shape[0]
    fits = shared <= _MARK_BYTES and slots.stride(1) == 1
    if not fits or slots.dtype != torch.int32 or counts.dtype != torch.int32 or page_places.dtype != torch.int32:
        return mark_selected.reference(slots, counts, page_places, units)
    places = -(-rows // PLACE)
    masks = torch.empty(places, units, 2, PLACE, dtype=torch.int64, device=slots.device)
    if places:
        how = Launch(grid=(places,), block=(256,), shared_bytes=shared, programmatic=True)
        MARK(how, slots, counts.contiguous(), page_places.contiguous(), slots.stride(0), rows, units, masks)
    return masks


_MAPS = TensorMaps()


def _columns(x: Tensor) -> Tensor:
    """Rows [n, H, W] as columns of 64 numbers [n, H W / 64, 64], a row's heads one after the other, rows at multiples of 16
    bytes; a copy where they lie otherwise."""
    count, heads, width = x.shape
    there = x.stride(2) == 1 and x.stride(1) == width and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    x = x if there else x.clone(memory_format=torch.contiguous_format)
    return x.as_strided((count, heads * width // _COLUMN, _COLUMN), (x.stride(0), _COLUMN, 1))


@masked_mha.on("sm90")
def run_mha(q: Tensor, kv: Tensor, rope: Tensor, lengths: Tensor, masks: Tensor, scale: float) -> Tensor:
    """bfloat16 queries and keys of 192 + 64 and values of 256: the kernel; otherwise the reference."""
    (rows, heads, width), tokens = q.shape, kv.shape[0]
    shape = (width - rope.shape[1], rope.shape[1], kv.shape[2] - _NOPE) == WIDTHS
    served = shape and masks.shape[1] * UNIT >= tokens > 0 and scale > 0
    if not served or {q.dtype, kv.dtype, rope.dtype} != {torch.bfloat16} or masks.dtype != torch.int64:
        return masked_mha.reference(q, kv, rope, lengths, masks, scale)
    out = torch.empty(rows, heads, _VALUE, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    queries, columns, shared = _columns(q), _columns(kv), in_rows(rope).unsqueeze(1)
    read = (queries, _ROWS), (columns, UNIT), (shared, UNIT), (columns, _VALUE_TOKENS)
    maps = (_MAPS.of(each, (count, 1, _COLUMN)) for each, count in read)
    how = Launch(grid=(heads, -(-rows // _ROWS)), block=(_THREADS,), shared_bytes=_SHARED_BYTES, programmatic=True)
    MHA(
        how, *maps,
        lengths.to(torch.int32).contiguous(), dense(masks), out, rows, tokens, masks.shape[1], scale / math.log(2),
    )  # fmt: skip
    return out
