# pyright: basic
"""`linear_heads` on Hopper: each head's rows times that head's matrix, one launch of `sm90_heads.cu`.

Owns the order of a packed weight, which `prologue` shares, and the launch. Imported by `sm90.py` here and there. A row's bits
depend on nothing but that row, whatever the number of rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.gemm import linear_heads
from legato.ops.gemm.sm90_packing import Kept, stored_of

#: As in `sm90_heads.cu`: warps of a block, outputs of a warp.
WARPS, SLICE = 4, 16
#: Rows beyond which the library multiplies.
MOST_ROWS = 128
#: K of one block: 16 bytes for each of four lanes.
BLOCK_K = 32
_SOURCE = Path(__file__).with_name("sm90_heads.cu")


def arrange(weight: Tensor) -> Tensor:
    """A weight [H, N, K] (16 divides N, 32 divides K) in the order in which a warp multiplies it: [H, N/8, K/32, 32, 8].

    Sixteen outputs are two tiles of eight. A lane has, of each tile and block of K, eight neighbours of K of one output;
    the tiles share out the outputs two by two, so that the four sums a lane ends up with are neighbours.
    """
    heads, outputs, inputs = weight.shape
    parts = weight.reshape(heads, outputs // SLICE, 4, 2, 2, inputs // BLOCK_K, 4, 8)
    return parts.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(heads, outputs // 8, inputs // BLOCK_K, 32, 8).contiguous()


def group_rows(rows: int) -> int:
    """Rows of one block: as many blocks as make one round of loads each, until their weights are read too often."""
    return 16 if rows <= 64 else 32


@cache
def kernel(inputs: int) -> tuple[Kernel, int]:
    """The kernel for matrices of `inputs` columns, and how many outputs one of its blocks computes."""
    split = next(split for split in (4, 2, 1) if inputs // BLOCK_K % split == 0)
    return Kernel(Source(_SOURCE, {"INPUTS": inputs, "SPLIT": split}), "linear_heads"), SLICE * WARPS // split


def pack(weight: Tensor) -> Tensor | Kept:
    """A bfloat16 weight in the kernel's order, beside itself; only itself where the kernel serves no such shape or type."""
    _, outputs, inputs = weight.shape
    if weight.dtype != torch.bfloat16 or inputs % BLOCK_K or outputs % kernel(inputs)[1]:
        return weight
    return Kept(arrange(weight), weight)


def run(x: Tensor, weight: Tensor | Kept) -> Tensor:
    """Up to `MOST_ROWS` rows of bfloat16 with a packed weight: the kernel. More: cuBLAS. Otherwise the reference."""
    if not isinstance(weight, Kept) or x.dtype != torch.bfloat16:
        return linear_heads.reference(x, stored_of(weight))
    rows, heads, inputs = x.shape
    outputs = weight.stored.shape[1]
    y = torch.empty(rows, heads, outputs, dtype=x.dtype, device=x.device)
    if rows > MOST_ROWS:
        torch.bmm(x.transpose(0, 1), weight.stored.transpose(1, 2), out=y.transpose(0, 1))
    elif rows:
        if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        compiled, width = kernel(inputs)
        group = group_rows(rows)
        blocks = heads * (outputs // width) * -(-rows // group)
        how = Launch(grid=(blocks,), block=(32 * WARPS,), programmatic=True)
        compiled(how, x, weight.packed, y, rows, heads, outputs, x.stride(0), x.stride(1), group)
    return y


linear_heads.on("sm90", pack=pack)(run)  # by hand: what is called here takes what `pack` made
