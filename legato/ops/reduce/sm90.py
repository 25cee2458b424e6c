# pyright: basic
"""Residual add and norm on Hopper, alone or with the ranks' sum before it, and small gathers: `sm90_add_norm.cu`,
`sm90_all_gather.cu`.

Owns the launches and what goes to them. Must not know how inboxes came to be mapped. Imported by `bind`, and by the
communicator that owns an inbox.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.pointwise import rms_norm
from legato.ops.reduce import Exchange, Recorded, add_rms_norm, all_gather, all_reduce_add_norm
from legato.ops.reduce.inbox import GATHER_BLOCKS, MOST_CALLS, MOST_RANKS, MOST_WORDS, Inbox, InboxShape
from legato.ops.strides import dense

_ADD_NORM = Path(__file__).with_name("sm90_add_norm.cu")
_ALL_GATHER = Path(__file__).with_name("sm90_all_gather.cu")
#: Numbers in a 16-byte piece of a row. A thread holds one, or several where the row has more than `_MOST_THREADS`.
_PIECE = 8
_MOST_THREADS = 768
_GATHER_THREADS = 256
#: Blocks that share a row of a sum, of those the most that have whole warps each.
_BLOCKS = (8, 4, 2)
#: Up to so many ranks: rows of a sum up to which blocks share each of them. Many ranks have too many words for one block; for few
#: it pays while a sum leaves most multiprocessors idle.
_SHARED_ROWS = {4: 8, MOST_RANKS: 32}


@cache
def threads(width: int) -> int | None:
    """Threads of the block that holds a row of `width` numbers; None where no whole warps do."""
    pieces, rest = divmod(width, _PIECE)
    for pieces_per_thread in (1, 2, 4):
        share, uneven = divmod(pieces, pieces_per_thread)
        if not (rest or uneven) and share and share % 32 == 0 and share <= _MOST_THREADS:
            return share
    return None


@cache
def blocks(shape: InboxShape, rows: int) -> int:
    """How many blocks share a row of such a sum. Several only where one would hold a piece in each thread: their order of
    additions is the same."""
    most_rows = next(_SHARED_ROWS[most] for most in sorted(_SHARED_ROWS) if shape.num_ranks <= most)
    if shape.is_two_shot(rows) or rows > most_rows or threads(shape.width) != shape.width // _PIECE:
        return 1
    return next((count for count in _BLOCKS if shape.width % (32 * _PIECE * count) == 0), 1)


@cache
def add_norm_kernel(
    num_ranks: int, width: int, local: bool = False, two_shot: bool = False, num_blocks: int = 1
) -> Kernel:
    """The kernel for rows of `width` (one that `threads` takes) and sums of `num_ranks` (0: the norm only). `local`: what
    all ranks send is in this GPU's memory already. `two_shot`: each row is added by one rank, which sends it on. `num_blocks`
    share a row."""
    own = width // num_blocks
    block = threads(own)
    assert block is not None
    macros = {"RANKS": num_ranks, "THREADS": block, "VECTORS": own // _PIECE // block, "BLOCKS": num_blocks}
    return Kernel(Source(_ADD_NORM, macros | {"LOCAL": int(local), "TWO_SHOT": int(two_shot)}), "add_norm")


def sum_kernel(shape: InboxShape, rows: int) -> Kernel:
    """The kernel for sums of so many rows through such inboxes."""
    two_shot, num_blocks = shape.is_two_shot(rows), blocks(shape, rows)
    return add_norm_kernel(shape.num_ranks, shape.width, two_shot=two_shot, num_blocks=num_blocks)


def _launch(rows: int, width: int, num_blocks: int = 1) -> Launch:
    """Of so many rows, each of which `num_blocks` share."""
    cluster = (num_blocks,) if num_blocks > 1 else None
    return Launch((rows * num_blocks,), (threads(width // num_blocks) or 0,), cluster, programmatic=True)


def load_sums(shape: InboxShape) -> None:
    """Compiles and loads what sums through such inboxes take, of few rows and of many: a warm-up need not meet all."""
    if threads(shape.width) is not None:
        for kernel in {sum_kernel(shape, rows) for rows in range(1, shape.rows + 1)}:
            kernel.load()


@cache
def all_gather_kernel(num_ranks: int) -> Kernel:
    """The kernel for gathers among `num_ranks`."""
    return Kernel(Source(_ALL_GATHER, {"RANKS": num_ranks, "THREADS": _GATHER_THREADS}), "all_gather")


@cache
def gather_local_kernel(num_ranks: int) -> Kernel:
    """The same where what all of them send is in this GPU's memory already."""
    return Kernel(Source(_ALL_GATHER, {"RANKS": num_ranks, "THREADS": _GATHER_THREADS}), "gather_local")


def is_served(weight: Tensor, *rows: Tensor) -> bool:
    """Whether the kernel takes these [T, D] rows and [D] weight; what it does not take, PyTorch does."""
    return (
        all(x.dtype is torch.bfloat16 for x in (weight, *rows))
        and all(x.dim() == 2 and x.shape[0] > 0 for x in rows)
        and threads(weight.shape[0]) is not None
    )


def _add_norm(
    kernel: Kernel, how: Launch, residual: Tensor, weight: Tensor, eps: float, *exchange: Any
) -> tuple[Tensor, Tensor]:
    residual = dense(residual)
    h, normed = torch.empty_like(residual), torch.empty_like(residual)
    kernel(how, residual, dense(weight), h, normed, eps, *exchange)
    return h, normed


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of [T, D] rows; PyTorch where the kernel does not take them."""
    if not is_served(weight, x):
        return rms_norm.reference(x, weight, eps)
    x = dense(x)
    normed = torch.empty_like(x)
    add_norm_kernel(0, x.shape[1])(_launch(*x.shape), x, dense(weight), None, normed, eps, None)
    return normed


@add_rms_norm.on("sm90")
def add_rms_norm_sm90(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of bfloat16 whose width whole warps hold: the kernel. Others: PyTorch."""
    if not is_served(weight, x, delta):
        return add_rms_norm.reference(x, delta, weight, eps)
    return _add_norm(add_norm_kernel(1, x.shape[1]), _launch(*x.shape), x, weight, eps, dense(delta))


@all_reduce_add_norm.on("sm90")
def all_reduce_add_norm_sm90(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """Through inboxes, where the exchange has one for rows of this width and they are few; else what the exchange gathers,
    summed and normed in one launch; PyTorch for other types and widths."""
    if is_served(weight, partial, residual):
        rows, width = residual.shape
        if isinstance(exchange, Inbox) and rows <= MOST_CALLS * exchange.shape.rows and width == exchange.shape.width:
            return _through_inbox(partial, residual, weight, eps, exchange)
        parts = exchange.gather(partial)
        if 1 < len(parts) <= MOST_RANKS:
            everyone = [*map(dense, parts), *[None] * (MOST_RANKS - len(parts))]
            kernel = add_norm_kernel(len(parts), width, local=True)
            return _add_norm(kernel, _launch(rows, width), residual, weight, eps, *everyone)
        exchange = Recorded((), tuple(parts[1:]))
        partial = parts[0]
    return all_reduce_add_norm.reference(partial, residual, weight, eps, exchange)


def _through_inbox(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: Inbox
) -> tuple[Tensor, Tensor]:
    """In one launch, or as many as there are times the rows that the inbox takes."""
    partial, residual, weight = dense(partial), dense(residual), dense(weight)
    h, normed = torch.empty_like(residual), torch.empty_like(residual)
    own, (rows, width), most = ctypes.c_uint64(exchange.address), residual.shape, exchange.shape.rows
    for first in range(0, rows, most):
        some = slice(first, min(first + most, rows))
        count = some.stop - first
        how = _launch(count, width, blocks(exchange.shape, count))
        kernel = sum_kernel(exchange.shape, count)
        kernel(how, residual[some], weight, h[some], normed[some], eps, partial[some], own, exchange.rank)
    return h, normed


@all_gather.on("sm90")
def all_gather_sm90(shard: Tensor, exchange: Exchange) -> Tensor:
    """Through inboxes, where the exchange has one and `shard` is few enough whole words; else what the exchange gathers, one
    behind the other in one launch; PyTorch for what is no whole words."""
    words, rest = divmod(shard.nbytes, 4)
    if not isinstance(exchange, Inbox) or rest or not 0 < words <= MOST_CALLS * MOST_WORDS:
        parts = exchange.gather(shard)
        if rest or not words or not shard.is_cuda or not 1 < len(parts) <= MOST_RANKS:
            return all_gather.reference(parts[0], Recorded((), tuple(parts[1:])))
        everyone = [*map(dense, parts), *[None] * (MOST_RANKS - len(parts))]
        gathered = torch.empty(len(parts), *shard.shape, dtype=shard.dtype, device=shard.device)
        local = Launch((min(-(-words // _GATHER_THREADS), 64), len(parts)), (_GATHER_THREADS,), programmatic=True)
        gather_local_kernel(len(parts))(local, *everyone, gathered, words)
        return gathered
    ranks, own = exchange.shape.num_ranks, ctypes.c_uint64(exchange.address)
    sent = dense(shard).view(-1).view(torch.int32)
    gathered = torch.empty(ranks, words, dtype=torch.int32, device=shard.device)
    for first in range(0, words, MOST_WORDS):
        count = min(words - first, MOST_WORDS)
        blocks = min(-(-count // (2 * _GATHER_THREADS)), GATHER_BLOCKS)
        how = Launch((blocks,), (_GATHER_THREADS,), programmatic=True)
        kernel = all_gather_kernel(ranks)
        kernel(how, sent[first:], gathered[:, first:], count, words, MOST_WORDS, own, exchange.rank)
    return gathered.view(shard.dtype).view(ranks, *shard.shape)
