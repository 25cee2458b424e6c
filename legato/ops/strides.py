"""Tensors as kernels read them, 16 bytes at a time: which layouts serve, and copies of those that do not.

Knows no op and reads no value. Called by the ops' `sm90.py` before a launch, so that a captured graph has these answers already.
"""

from __future__ import annotations

from torch import Tensor, contiguous_format

#: Bytes of a load.
PIECE_BYTES = 16


def is_dense(*tensors: Tensor) -> bool:
    """Whether each of them is contiguous and begins at a multiple of 16 bytes."""
    return all(x.is_contiguous() and x.data_ptr() % PIECE_BYTES == 0 for x in tensors)


def dense(x: Tensor) -> Tensor:
    """`x` where it `is_dense`, otherwise a copy that is."""
    return x if is_dense(x) else x.clone(memory_format=contiguous_format)


def in_rows(x: Tensor) -> Tensor:
    """x [T, D] where its rows begin at multiples of 16 bytes, as a slice of wider rows may; otherwise a copy whose rows do."""
    if x.stride(1) == 1 and x.stride(0) * x.itemsize % PIECE_BYTES == 0 and x.data_ptr() % PIECE_BYTES == 0:
        return x
    rows, width = x.shape
    whole = -(-width * x.itemsize // PIECE_BYTES) * PIECE_BYTES // x.itemsize
    return x.new_empty(rows, whole)[:, :width].copy_(x)
