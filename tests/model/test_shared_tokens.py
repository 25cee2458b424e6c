"""Rows of a prompt that share tokens attend as they would alone, and the runtime says which may."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from legato.model.attention import shared
from legato.model.step import Prompt, Selection, Step
from legato.ops import masked_mla, sparse_mla


def test_masks_are_the_selection_again() -> None:
    """21 rows of 8 heads behind 90 tokens, some of them selected: 16 rows share tokens, 5 are left."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.tensor([5, 2, 7])
    tokens = (pages[:, None] * 64 + torch.arange(64)).view(-1)[:111].to(torch.int32)
    lengths = torch.arange(91, 112, dtype=torch.int32)
    counts = torch.full((21,), 40, dtype=torch.int32)
    picked = [torch.randperm(int(n), generator=generator)[:40].sort().values for n in lengths]
    slots = torch.stack([tokens[some] for some in picked])
    blank = torch.zeros(21)
    step = Step(blank, blank, torch.zeros(1, 3), lengths, blank, blank, blank, prompt=Prompt(tokens, pages))
    selection = shared(Selection(slots, counts), step, 8, 9)
    together = selection.together
    assert together is not None and together.num_rows == 16 and together.lengths.tolist() == [98, 106]
    cache = torch.randn(9, 64, 24, generator=generator)
    q = torch.randn(21, 8, 24, generator=generator)
    alone = sparse_mla.reference(q, cache, slots, counts, 0.2, 16)
    made = masked_mla.reference(q[:16], cache, tokens, together.lengths, together.masks, 0.2, 16)
    assert torch.allclose(made, alone[:16], atol=1e-5)


@pytest.mark.parametrize("heads", [64, 7, 128])
def test_rows_that_fill_the_product_alone_share_nothing(heads: int) -> None:
    blank = torch.zeros(8)
    step = Step(blank, blank, blank, blank, blank, blank, blank, prompt=Prompt(blank, blank))
    selection = Selection(blank, blank)
    assert shared(selection, step, heads, 9) is selection
    assert shared(selection, replace(step, prompt=None), 8, 9) is selection
