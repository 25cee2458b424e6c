"""Where ranks meet: sums that join the residual stream, with the norm that the next block reads, and gathered shards.

Owns the meaning of each and their cases. Knows no model, no process group and no transport: who the ranks are comes in
as an `Exchange`. Called by `legato.parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from legato.ops.case import BFLOAT16, EXACT, FLOAT32, Case, Draw
from legato.ops.invariant import float32
from legato.ops.op import op
from legato.ops.pointwise import rms_norm


class Exchange(Protocol):
    """The ranks that meet: every one of them makes the same calls in the same order."""

    def gather(self, shard: Tensor, /) -> Sequence[Tensor]:
        """Every rank's `shard`, in the order of ranks; the own one among them."""
        ...


@dataclass(frozen=True)
class Recorded:
    """An exchange without peers: what the others would send is already here.

    `before` and `after`: the shards of lower and of higher ranks, each like the caller's own.
    """

    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]

    def gather(self, shard: Tensor) -> Sequence[Tensor]:
        return (*self.before, shard, *self.after)


@op
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, and its norm for the next: h = x + delta, normed = rms_norm(h, weight, eps).

    x and delta [T, D] of one dtype, weight [D] -> h and normed [T, D] in that dtype. h is rounded to it before it is
    normed, so that the norm is that of the stream which later layers read.
    """
    h = x + delta
    return h, rms_norm.reference(h, weight, eps)


@op
def all_reduce_add_norm(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of all ranks' partial sums: h = residual + sum over ranks, normed = rms_norm(h).

    partial and residual [T, D] of one dtype, weight [D] -> h and normed [T, D], the same bits on every rank: partial
    sums are added in float32 in the order of ranks, the residual last, and h is rounded once.
    """
    first, *others = exchange.gather(partial)
    total = float32(first)
    for other in others:
        total = total + float32(other)
    h = (total + float32(residual)).to(residual.dtype)
    return h, rms_norm.reference(h, weight, eps)


@op
def all_gather(shard: Tensor, exchange: Exchange) -> Tensor:
    """Every rank's `shard`, in the order of ranks: [...] -> [N, ...], bit by bit. For what is small and needed at once."""
    return torch.stack(list(exchange.gather(shard)))


def _stream(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, delta, weight, eps."""
    weight = 1 + draw.normal(width, dtype=dtype, scale=0.3)
    return draw.normal(rows, width, dtype=dtype, scale=3.0), draw.normal(rows, width, dtype=dtype), weight, 1e-5


def _add_norm_case(rows: int, width: int, dtype: torch.dtype) -> Case:
    return Case(
        add_rms_norm,
        f"add_rms_norm rows={rows} width={width} {str(dtype)[6:]}",
        lambda draw: _stream(draw, rows, width, dtype),
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=(4 * rows + 1) * width * dtype.itemsize,
    )


def _all_reduce_case(rows: int, width: int, ranks: int, rank: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        residual, partial, weight, eps = _stream(draw, rows, width, dtype)
        others = [draw.normal(rows, width, dtype=dtype) for _ in range(ranks - 1)]
        return partial, residual, weight, eps, Recorded(tuple(others[:rank]), tuple(others[rank:]))

    return Case(
        all_reduce_add_norm,
        f"all_reduce_add_norm rows={rows} width={width} ranks={ranks} rank={rank} {str(dtype)[6:]}",
        make,
        BFLOAT16 if dtype == torch.bfloat16 else FLOAT32,
        bytes=((3 + ranks) * rows + 1) * width * dtype.itemsize,
    )


def _gather_case(count: int, ranks: int, rank: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        others = [draw.normal(count) for _ in range(ranks - 1)]
        return draw.normal(count), Recorded(tuple(others[:rank]), tuple(others[rank:]))

    name = f"all_gather count={count} ranks={ranks} rank={rank}"
    return Case(all_gather, name, make, EXACT, bytes=2 * ranks * count * 4)


CASES = (
    *(
        _add_norm_case(rows, width, dtype)
        for rows, width, dtype in (
            (1, 256, torch.float32),
            (37, 6144, torch.float32),
            (1, 6144, torch.bfloat16),
            (6, 256, torch.bfloat16),
            (6, 6144, torch.bfloat16),
            (16, 6144, torch.bfloat16),
            (64, 6144, torch.bfloat16),
        )
    ),
    *(
        _all_reduce_case(rows, width, ranks, rank, dtype)
        for rows, width, ranks, rank, dtype in (
            (6, 256, 2, 0, torch.float32),
            (6, 256, 2, 1, torch.float32),
            (37, 48, 3, 1, torch.float32),
            (6, 6144, 8, 5, torch.bfloat16),
        )
    ),
    _gather_case(12, 2, 1),
    _gather_case(37, 8, 3),
)
