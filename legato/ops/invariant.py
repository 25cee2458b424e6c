"""Arithmetic in which the bits of a row never depend on how many other rows there are or where it stands among them.

Owns the two tricks the references are built from: matrix products in blocks of eight rows, and transcendental functions
in whole vectors. Knows no op. Called by the reference bodies; on a GPU the same code runs, with the library's own
guarantees.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Rows of one matrix product. With exactly 8 rows the CPU libraries treat every row alike; with 1..7 or 9 they do not.
ROW_BLOCK = 8
#: Columns of one product, where they divide the width: small products run in parallel, one per core, each on one core.
COLUMN_BLOCK = 64
#: Columns of a block of a packed weight.
PACKED_BLOCK = 16
#: Elements a transcendental function sees at once: below the size at which PyTorch splits a call over threads at
#: arbitrary places.
_VECTOR_CHUNK = 16384
#: A multiple of every vector width in use: within it no element falls in a scalar tail, whose exp and log round
#: differently.
_VECTOR = 64


def float32(x: Tensor) -> Tensor:
    """`x` itself where it is float32 already; asking is several times cheaper than a conversion that does nothing."""
    return x if x.dtype is torch.float32 else x.to(torch.float32)


def pad_rows(x: Tensor) -> Tensor:
    """`x` [T, K] in float32, contiguous, with zero rows appended up to a multiple of ROW_BLOCK."""
    missing = -x.shape[0] % ROW_BLOCK
    x = float32(x)
    return torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x.contiguous()


def pack_columns(*weights: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Each weight [..., N, K] as contiguous column blocks [..., N/16, K, 16], where it is on a CPU and 16 divides N.

    The product then streams through memory: twice as fast at eight rows. `matmul` and `moe_bf16` take either form.
    """
    packed = tuple(_pack(weight) for weight in weights)
    return packed[0] if len(packed) == 1 else packed


def _pack(weight: Tensor) -> Tensor:
    if weight.device.type != "cpu" or weight.shape[-2] % PACKED_BLOCK:
        return weight
    return weight.unflatten(-2, (-1, PACKED_BLOCK)).transpose(-1, -2).contiguous()


def column_blocks(weight: Tensor) -> Tensor:
    """`weight` [N, K] or [n, N, K] (float32) seen as [n * N/b, K, b], where b is at most COLUMN_BLOCK and divides N."""
    rows, columns = weight.shape[-2:]
    block = COLUMN_BLOCK
    while rows % block and block > 16:
        block //= 2
    if rows % block:
        block = rows
    return weight.reshape(-1, block, columns).transpose(1, 2)


def block_matmul(rows: Tensor, blocks: Tensor) -> Tensor:
    """The product of one block of rows with a matrix given as column blocks: [m, K] times [N/b, K, b] -> [m, N].

    Callers always pass the same m: only then is a row's result independent of its neighbours.
    """
    count, _, width = blocks.shape
    products = torch.bmm(rows.expand(count, *rows.shape), blocks)
    return products.transpose(0, 1).reshape(rows.shape[0], count * width)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] (or its `pack_columns`) transposed, in float32 -> [T, N]."""
    rows = x.shape[0]
    padded = pad_rows(x)
    weight = float32(weight)
    blocks = weight if weight.dim() == 3 else column_blocks(weight)
    if padded.shape[0] == ROW_BLOCK:
        product = block_matmul(padded, blocks)
        return product if rows == ROW_BLOCK else product[:rows]
    if not rows:
        return padded.new_zeros(0, blocks.shape[0] * blocks.shape[2])
    return torch.cat([block_matmul(block, blocks) for block in padded.split(ROW_BLOCK)])[:rows]


def map_elements(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` (elementwise, shape-preserving) of every element of `x` [..., n], float32."""
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    missing = -width % _VECTOR
    padded = torch.constant_pad_nd(x, (0, missing), 1.0) if missing else x.contiguous()
    if padded.numel() <= _VECTOR_CHUNK:
        mapped = function(padded)
    else:
        mapped = torch.cat([function(chunk) for chunk in padded.view(-1).split(_VECTOR_CHUNK)]).view(padded.shape)
    return mapped[..., :width] if missing else mapped
