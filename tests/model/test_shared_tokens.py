"""Rows of a prompt that share tokens attend as they would alone, and do so where that takes less time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.model.attention import shared
from legato.model.step import Prompt, Selection, Step
from legato.ops import masked_mla, sparse_mla
from legato.ops.attend.masked import sharing_pays

MEASURED = Path(__file__).parents[2] / "records" / "2026-12-01-attention-rows" / "forms.jsonl"


def test_masks_are_the_selection_again() -> None:
    """261 rows of 8 heads behind 90 tokens, some of them selected: 256 rows share tokens, 5 are left."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.tensor([5, 2, 7, 0, 8, 3])
    tokens = (pages[:, None] * 64 + torch.arange(64)).view(-1)[:351].to(torch.int32)
    lengths = torch.arange(91, 352, dtype=torch.int32)
    counts = torch.full((261,), 40, dtype=torch.int32)
    picked = [torch.randperm(int(n), generator=generator)[:40].sort().values for n in lengths]
    slots = torch.stack([tokens[some] for some in picked])
    blank = torch.zeros(261)
    step = Step(blank, blank, torch.zeros(1, 6), lengths, blank, blank, blank, prompt=Prompt(tokens, pages))
    cache = torch.randn(9, 64, 24, generator=generator)
    selection = shared(Selection(slots, counts), step, 8, 9)
    together = selection.together
    assert together is not None and together.num_rows == 256
    assert together.lengths.tolist() == list(range(98, 347, 8))
    q = torch.randn(261, 8, 24, generator=generator)
    alone = sparse_mla.reference(q, cache, slots, counts, 0.2, 16)
    made = masked_mla.reference(q[:256], cache, tokens, together.lengths, together.masks, 0.2, 16)
    assert torch.allclose(made, alone[:256], atol=1e-5)


@pytest.mark.parametrize("heads", [64, 7, 128, 4])
def test_rows_that_fill_the_product_alone_share_nothing(heads: int) -> None:
    blank = torch.zeros(300)
    step = Step(blank, blank, blank, blank, blank, blank, blank, prompt=Prompt(blank, blank))
    selection = Selection(blank, blank)
    assert shared(selection, step, heads, 9) is selection
    assert shared(selection, replace(step, prompt=None), 8, 9) is selection


def test_rows_share_tokens_where_that_was_faster() -> None:
    """On an H200, in all measured cases, but for 15 % of the time."""
    cases = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    chosen = [sharing_pays(case["rows"], case["length"], case["heads"]) for case in cases]
    assert 10 < sum(chosen) < len(cases) - 10
    for pays, case in zip(chosen, cases, strict=True):
        took, other = (case[form] for form in (("together", "alone") if pays else ("alone", "together")))
        assert took <= 1.15 * other, case
