# pyright: reportPrivateImportUsage=false
"""Who a rank is, what a rank that is alone returns, and what the loop-back counts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, distributed

from legato.ops import add_rms_norm, greedy_keys
from legato.parallel import ALONE, DistributedRank, LoopBack, Mesh
from legato.parallel.communicators import Communicator, best_token


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


@dataclass(frozen=True)
class Listening(LoopBack):
    """A rank whose gathers bring what `others` said."""

    others: tuple[Tensor, ...] = ()

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        super().all_gather(shard, dim)
        return torch.cat(self.others) if self.others else shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_share_a_vocabulary_agree_on_the_best_token_of_all(dtype: torch.dtype) -> None:
    """Ties across ranks go to the lowest id, negative rows and infinities count; padding of the last two ranks does not."""
    torch.manual_seed(0)
    vocab, width, size = 37, 12, 4
    logits = torch.randn(9, size * width).round().to(dtype)
    logits[:2] -= 50
    logits[2], logits[3, 20] = -torch.inf, torch.inf
    logits[:, vocab:] = 1000.0
    expected = logits[:, :vocab].argmax(-1)
    shards = [logits[:, rank * width : (rank + 1) * width] for rank in range(size)]

    def best(communicator: Communicator, rank: int) -> Tensor:
        return best_token(lambda first, count: greedy_keys(shards[rank][:, :count], first), width, vocab, communicator)

    said = [Listening(Mesh(rank, size)) for rank in range(size)]
    keys = tuple(
        greedy_keys(shard[:, : max(0, vocab - rank * width)], rank * width)[None] for rank, shard in enumerate(shards)
    )
    for rank, alone in enumerate(said):
        assert torch.equal(best(Listening(Mesh(rank, size), others=keys), rank), expected)
        best(alone, rank)
        assert (alone.exchanges.gathers, alone.exchanges.num_bytes) == (1, 9 * 8)
    alone = best_token(lambda first, count: greedy_keys(logits[:, :count], first), size * width, vocab, ALONE)
    assert torch.equal(alone, expected)


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
