"""Two and four ranks over gloo give the tokens of one, with and without drafts, greedy and sampled."""

from __future__ import annotations

import json

import pytest

from legato.checkpoints import HELD_OUT, SMALL
from legato.model.checkpoint import Checkpoint
from legato.server.text.tokenizer import Tokenizer
from tests.parallel.ranks import Answer, Job, Prompts, of_group, of_one

NEAR_TIE = 1e-3
"""Two best log-probabilities closer than this may change places: sums over shards round otherwise than one sum does."""


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Held-out code, on both sides of a page (64) and of `index_topk` (256)."""
    tokenizer = Tokenizer.open(Checkpoint.open(SMALL).source)
    lines = HELD_OUT.read_text().splitlines()
    text = [token for line in lines for token in tokenizer.encode_prompt(json.loads(line)["text"])]
    lengths = (5, 63, 64, 65, 250, 300)
    return [tuple(text[sum(lengths[:n]) : sum(lengths[: n + 1])]) for n in range(len(lengths))]


def flips(found: Answer, expected: Answer) -> list[tuple[int, float]]:
    """Where answers part, as (place, margin of the two best there); what comes after is another text."""
    for place, ((token, _), (other, best)) in enumerate(zip(found, expected, strict=True)):
        if token != other:
            return [(place, best[0] - best[1])]
    return []


def test_two_ranks_give_the_tokens_of_one(prompts: Prompts) -> None:
    job = Job(prompts[:1], max_tokens=8, num_drafts=3)
    expected = [[token for token, _ in answer] for answer in of_one(job)]
    for rank in of_group(job, 2):
        assert [[token for token, _ in answer] for answer in rank] == expected


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("num_drafts", "temperature"), [(0, 0.0), (5, 0.0), (5, 0.8)])
def test_groups_give_the_tokens_of_one(prompts: Prompts, size: int, num_drafts: int, temperature: float) -> None:
    job = Job(prompts, max_tokens=32, num_drafts=num_drafts, temperature=temperature)
    expected, ranks = of_one(job), of_group(job, size)
    assert all(rank == ranks[0] for rank in ranks), "ranks of one group differ"
    for number, (found, wanted) in enumerate(zip(ranks[0], expected, strict=True)):
        for place, margin in flips(found, wanted):
            print(
                f"{size} ranks, K {num_drafts}, T {temperature}: request {number} parts at {place}, margin {margin:.2e}"
            )
            assert temperature == 0.0 and margin < NEAR_TIE
