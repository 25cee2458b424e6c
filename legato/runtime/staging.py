"""From the host to the device without waiting for it.

Owns the two ways in which numbers that a plan brings get there: as a new tensor, or into one that lasts. Called by whatever
writes device tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}
"""Of the types whose numbers Python lays out by itself, three times as fast as PyTorch reads a list."""


def staged(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, valid for what is issued after it on the current stream.

    To a GPU they go through pinned memory, which PyTorch's allocator gives to no one else before the copy has ended; from
    pageable memory the copy would wait for everything that was launched before it.
    """
    return to_device(_on_host(values, dtype), device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The same for a tensor of the host."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def stage_into(target: Tensor, values: Sequence[int]) -> None:
    """The same into a contiguous tensor of that many elements, which takes no device memory."""
    host = _on_host(values, target.dtype)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)


def _on_host(values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
    code = _CODES.get(dtype)
    if code is None or not values:
        return torch.tensor(values, dtype=dtype)
    return torch.frombuffer(array(code, values), dtype=dtype)
