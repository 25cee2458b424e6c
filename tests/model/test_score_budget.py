"""Index scores keep to their budget at a long context, and no bit of the selection depends on the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legato.checkpoints import SMALL
from legato.config import Config, ConfigError, ExecutionConfig, resolve, score_rows
from legato.model.attention import select
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.spec import ModelSpec
from legato.model.step import Step
from legato.ops import rope_angles

MIB = 1 << 20
ROWS, CONTEXT = 40, 40 * 1024


class Largest(TorchDispatchMode):
    """Bytes of the largest memory that any operation made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out


class Indexer:
    """A small indexer with a long cache, and the last chunk of a prompt over it."""

    def __init__(self) -> None:
        spec = stored_spec(Checkpoint.open(SMALL))
        self.spec: ModelSpec = replace(spec, index_heads=2, index_topk=300)
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        dim, heads = spec.index_dim, self.spec.index_heads
        self.q, self.gates = normal(ROWS, heads, dim), normal(ROWS, heads)
        num_pages = CONTEXT // 64
        self.cache = normal(num_pages + 1, 64, dim)
        positions = torch.arange(CONTEXT - ROWS, CONTEXT)
        cos, sin = rope_angles(positions, spec.rope_theta, spec.rope_dim)
        table = torch.randperm(num_pages, generator=draw).to(torch.int32)[None] + 1
        self.step = Step(
            positions, torch.zeros(ROWS, dtype=torch.int32), table, (positions + 1).to(torch.int32),
            torch.full((ROWS,), -1, dtype=torch.int32), cos, sin,
        )  # fmt: skip

    def selection(self, score_bytes: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Slots, counts, and the largest allocation on the way."""
        step = replace(self.step, score_bytes=score_bytes)
        with Largest() as largest:
            found = select(self.q, self.gates, self.cache, step, self.spec.index_topk)
        return found.slots, found.counts, largest.num_bytes


@pytest.mark.full
def test_a_chunk_at_a_long_context_keeps_to_the_budget() -> None:
    indexer = Indexer()
    whole_bytes = 8 * ROWS * CONTEXT
    slots, counts, largest = indexer.selection(whole_bytes)
    assert largest >= whole_bytes, "untiled, the ranking of all rows is one tensor"
    assert slots.shape == (ROWS, 300) and counts.unique().tolist() == [300]
    for budget in (9 * MIB, 10 * MIB):
        height = score_rows(budget, CONTEXT)
        assert 1 < height < ROWS and ROWS % height, "tiles that do not divide the rows"
        tiled_slots, tiled_counts, largest = indexer.selection(budget)
        assert largest <= budget
        assert torch.equal(tiled_slots, slots) and torch.equal(tiled_counts, counts)
    row_slots, _, _ = indexer.selection(1)
    assert torch.equal(row_slots, slots), "one row at a time"


def test_the_budget_has_defaults_and_a_least() -> None:
    def settled(config: Config, cuda: bool) -> int:
        return resolve(config, max_position=1 << 20, has_mtp=True, cuda_available=cuda).score_bytes

    assert settled(Config(), False) == 64 * MIB
    assert settled(Config(), True) == 1024 * MIB
    assert settled(Config(execution=ExecutionConfig(score_bytes=5 * MIB)), True) == 5 * MIB
    assert score_rows(1024 * MIB, 1 << 20) == 128
    assert score_rows(MIB, 1 << 20) == 1
    with pytest.raises(ConfigError, match="score_bytes must be at least one MiB"):
        Config(execution=ExecutionConfig(score_bytes=MIB - 1))
