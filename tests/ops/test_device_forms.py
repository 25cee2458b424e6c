"""The forms of references that a GPU runs (no value is read on the host), on the CPU against those that a CPU runs."""

from __future__ import annotations

import pytest
import torch

from legato.ops.cache import _repeated
from legato.ops.cache.layout import e4m3_to_float
from legato.ops.experts import CASES as EXPERT_CASES
from legato.ops.experts import _moe_masked
from legato.ops.invariant import float32
from legato.ops.sample import CASES as SAMPLE_CASES
from legato.ops.sample import _sample_all, sample
from legato.ops.score import CASES as SCORE_CASES
from legato.ops.score import _score_everything

MOE = [case for case in EXPERT_CASES if case.op.name == "moe_bf16" and case.on == "any" and len(case.weights) == 2]
SCORES = [case for case in SCORE_CASES if case.on == "any"]
SAMPLE = [case for case in SAMPLE_CASES if case.op is sample and case.on == "any"]


@pytest.mark.parametrize("case", MOE, ids=lambda case: case.name)
def test_every_expert_masked_is_the_chosen_experts(case):
    x, ids, weights, w13, w2 = case.inputs("cpu")
    masked = _moe_masked(x, ids, weights, lambda run: (float32(w13[run]), float32(w2[run])), w13.shape[0])
    assert case.mismatch((masked,), case.outputs(case.op.reference, case.inputs("cpu"))) is None


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_every_row_drawn_is_the_rows_that_ask_for_it(case):
    logits, temperature, top_k, top_p, min_p, seed, position = case.inputs("cpu")
    tokens = _sample_all(logits, temperature, (top_k, top_p, min_p), seed, position)
    assert torch.equal(tokens, sample.reference(logits, temperature, top_k, top_p, min_p, seed, position))


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_all_pages_scored_are_those_that_are_seen(case):
    q, gates, cache, page_table, request, *_ = case.inputs("cpu")
    queries = e4m3_to_float(q) if q.dtype == torch.float8_e4m3fn else q
    scores = torch.full((q.shape[0], 64 * page_table.shape[1]), -torch.inf)
    _score_everything(scores, queries, gates, cache, page_table[request.long()])
    expected = case.outputs(case.op.reference, case.inputs("cpu"))
    assert case.mismatch(case.defined(case.inputs("cpu"), (scores,)), expected) is None


@pytest.mark.parametrize("slots", [[-1, 4, -1, 2], [-1, -1], [3, 0, 1], []])
def test_a_skipped_row_repeats_one_that_is_stored(slots):
    cache, rows = torch.arange(12.0).view(6, 2), torch.full((len(slots), 2), 100.0).cumsum(0)
    expected = cache.clone()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            expected[slot] = row
    values, places = _repeated(cache[:1], rows, torch.tensor(slots, dtype=torch.int32))
    cache.index_copy_(0, places, values)
    assert torch.equal(cache, expected)
