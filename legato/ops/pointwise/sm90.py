# pyright: basic
"""Norms of rows on Hopper, what goes into the first layer and into the MTP layer, and SwiGLU: one launch each of `sm90.cu`.

Owns the launches and the choice between them and the references. Imported by `bind` only. A row's bits depend on nothing but
that row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.pointwise import embed_norm, mtp_inputs, mtp_looked_up, rms_norm, swiglu
from legato.ops.strides import in_rows, is_dense

#: Numbers in 16 bytes of bfloat16, threads of a block at most, and pieces of a row that a thread holds at most.
_PIECE, _MOST_THREADS, _MOST_PIECES = 8, 256, 8
#: The y extent of a grid.
_MOST_ROWS = 65535
_SOURCE = Path(__file__).with_name("sm90.cu")


@cache
def kernel(name: str, width: int) -> tuple[Kernel, int]:
    """A kernel for rows of `width`, and the threads of its blocks."""
    pieces = width // _PIECE
    threads = min(_MOST_THREADS, -(-pieces // 32) * 32)
    return Kernel(Source(_SOURCE, {"THREADS": threads, "PIECES": -(-pieces // threads)}), name), threads


def serves(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels take rows like x's: bfloat16, whole pieces, few enough of them for a block's registers. The
    reference runs for all others."""
    width = x.shape[-1]
    return (
        all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
        and width % _PIECE == 0
        and 0 < width <= _PIECE * _MOST_THREADS * _MOST_PIECES
        and is_dense(*weights)
    )


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as rows whose 16-byte pieces are aligned; a slice of wider rows stays where it is."""
    return in_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


@rms_norm.on("sm90")
def run_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel where it `serves`, otherwise the reference."""
    if not serves(x, weight):
        return rms_norm.reference(x, weight, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _rows(x)
    if rows.shape[0]:
        compiled, threads = kernel("rms_norm", rows.shape[1])
        how = Launch(grid=(rows.shape[0],), block=(threads,), programmatic=True)
        compiled(how, rows, weight, y, rows.shape[1] // _PIECE, rows.stride(0), float(eps))
    return y


@embed_norm.on("sm90")
def run_embed_norm(ids: Tensor, embed: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The kernel where it `serves` and indices are 64-bit, otherwise the reference."""
    if not serves(embed, embed, weight) or ids.dtype != torch.int64:
        return embed_norm.reference(ids, embed, weight, eps)
    rows, width = ids.shape[0], embed.shape[1]
    h, normed = (torch.empty(rows, width, dtype=embed.dtype, device=embed.device) for _ in range(2))
    if rows:
        compiled, threads = kernel("embed_norm", width)
        how = Launch(grid=(rows,), block=(threads,), programmatic=True)
        compiled(how, ids.contiguous(), embed, weight, h, normed, width // _PIECE, float(eps))
    return h, normed


@mtp_inputs.on("sm90")
def run_mtp_inputs(
    ids: Tensor, positions: Tensor, hidden: Tensor, embed: Tensor, enorm: Tensor, hnorm: Tensor, eps: float
) -> Tensor:
    """The kernel where it `serves` and indices are 64-bit, otherwise the reference."""
    if not serves(hidden, embed, enorm, hnorm) or ids.dtype != torch.int64 or positions.dtype != torch.int64:
        return mtp_inputs.reference(ids, positions, hidden, embed, enorm, hnorm, eps)
    rows, width = hidden.shape
    y = torch.empty(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    if rows:
        hidden = _rows(hidden)
        compiled, threads = kernel("mtp_inputs", width)
        how = Launch(grid=(2 * rows,), block=(threads,), programmatic=True)
        ids, positions = ids.contiguous(), positions.contiguous()
        compiled(how, ids, positions, hidden, embed, enorm, hnorm, y, width // _PIECE, hidden.stride(0), float(eps))
    return y


@mtp_looked_up.on("sm90")
def run_mtp_looked_up(
    ids: Tensor, positions: Tensor, hidden: Tensor, table: Tensor, hnorm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The kernel where it `serves`, the table has whole pieces and indices are 64-bit, otherwise the reference."""
    fits = serves(hidden, hnorm) and serves(table, table)
    if not fits or ids.dtype != torch.int64 or positions.dtype != torch.int64:
        return mtp_looked_up.reference(ids, positions, hidden, table, hnorm, eps)
    (rows, width), part_width = hidden.shape, table.shape[1]
    part = torch.empty(rows, part_width, dtype=hidden.dtype, device=hidden.device)
    normed = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
    if rows:
        hidden = _rows(hidden)
        compiled, threads = kernel("mtp_looked_up", width)
        how = Launch(grid=(2 * rows,), block=(threads,), programmatic=True)
        compiled(
            how, ids.contiguous(), positions.contiguous(), hidden, table, hnorm, part, normed, width // _PIECE,
            part_width // _PIECE, hidden.stride(0), float(eps),
        )  # fmt: skip
    return part, normed


@swiglu.on("sm90")
def run_swiglu(gate_up: Tensor) -> Tensor:
    """The kernel for rows of bfloat16 of whole pieces, otherwise the reference."""
    width = gate_up.shape[-1] // 2
    if (
        gate_up.dtype != torch.bfloat16
        or width % _PIECE
        or not gate_up.numel()
        or gate_up.numel() // (2 * width) > _MOST_ROWS
    ):
        return swiglu.reference(gate_up)
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    rows, pieces = _rows(gate_up), width // _PIECE
    compiled, threads = kernel("swiglu", width)
    how = Launch(grid=(-(-pieces // threads), rows.shape[0]), block=(threads,), programmatic=True)
    compiled(how, rows, y, pieces, rows.stride(0))
    return y
