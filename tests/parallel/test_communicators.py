# pyright: reportPrivateImportUsage=false
"""Who a rank is, what a rank that is alone returns, and what the loop-back counts."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from legato.ops import add_rms_norm
from legato.parallel import ALONE, DistributedRank, LoopBack, Mesh


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 2), (2, 2)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="size" if size < 1 else "rank"):
        Mesh(rank, size)


def test_shares_are_equal_and_cover_a_width() -> None:
    assert [list(Mesh(rank, 3).share(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="7 does not divide over 3 ranks"):
        Mesh(0, 3).share(7)


def test_a_rank_alone_adds_and_norms() -> None:
    partial, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    for found, expected in zip(
        ALONE.add_norm(partial, residual, weight, 1e-5), add_rms_norm(residual, partial, weight, 1e-5), strict=True
    ):
        assert torch.equal(found, expected)
    assert ALONE.all_reduce(partial) is partial and ALONE.all_gather(partial, -1) is partial


def test_a_loop_back_gives_its_own_part_and_counts() -> None:
    alone = LoopBack(Mesh(1, 4))
    partial, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    h, _ = alone.add_norm(partial, residual, weight, 1e-5)
    assert torch.equal(h, residual + partial)
    assert alone.all_gather(partial, -1).shape == (3, 32) and alone.all_gather(partial, 0).shape == (12, 8)
    assert alone.all_reduce(partial) is partial
    counted = alone.exchanges
    assert (counted.sums, counted.gathers, counted.num_bytes) == (2, 2, 4 * 3 * 8 * 4)
    counted.clear()
    assert (counted.sums, counted.gathers, counted.num_bytes) == (0, 0, 0)


def test_a_communicator_must_be_of_the_group_that_there_is() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="the weights were cut for"):
            DistributedRank(Mesh(0, 2))
        only = DistributedRank(Mesh(0, 1))
        x = torch.randn(2, 3, dtype=torch.bfloat16)
        assert torch.equal(only.all_reduce(x), x) and torch.equal(only.all_gather(x.T, 0), x.T)
    finally:
        distributed.destroy_process_group()
