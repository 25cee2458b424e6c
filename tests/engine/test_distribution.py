"""Speculative sampling has the plain distribution, on the shipped checkpoint: chi-square, with a control that must fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from legato.schedule import Request
from legato.types import SamplingParams
from tests.engine.conftest import Shipped, run

PROMPT = "def parse(self, text):\n    "
TOKENS = 2
LIMIT = 40.0
"""Chi-square of 15 degrees of freedom exceeds this with probability 5e-4."""


def sample(shipped: Shipped, num_drafts: int, count: int, first_seed: int, temperature: float) -> list[list[int]]:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_k=50, ignore_eos=True)
    prompt = tuple(shipped.tokenizer.encode_prompt(PROMPT))
    engine = shipped.engine(num_drafts=num_drafts, max_running=48)
    return run(engine, [Request(f"r{n}", prompt, params, (), first_seed + n) for n in range(count)])


def chi_square(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Two-sample statistic over the 15 most frequent tokens and the rest together."""
    a, b = Counter(ours), Counter(theirs)
    frequent = [token for token, _ in (a + b).most_common(15)]
    cells = [(a[token], b[token]) for token in frequent]
    cells.append((len(ours) - sum(x for x, _ in cells), len(theirs) - sum(y for _, y in cells)))
    return sum((x - y) ** 2 / (x + y) for x, y in cells if x + y)


def compare(shipped: Shipped, count: int) -> None:
    plain = sample(shipped, 0, count, 0, 1.0)
    drafted = sample(shipped, 3, count, 10**6, 1.0)
    colder = sample(shipped, 0, count, 2 * 10**6, 0.3)
    for position in range(TOKENS):
        ours = [tokens[position] for tokens in drafted]
        theirs = [tokens[position] for tokens in plain]
        control = [tokens[position] for tokens in colder]
        assert chi_square(ours, theirs) < LIMIT
        assert chi_square(control, theirs) > LIMIT, "a wrong temperature must be seen, or the test sees nothing"


@pytest.mark.full
def test_a_few_hundred_samples(shipped: Shipped) -> None:
    compare(shipped, 128)


@pytest.mark.full
def test_thousands_of_samples(shipped: Shipped) -> None:
    compare(shipped, 4000)


def test_the_same_seed_gives_the_same_tokens_with_and_without_drafts(shipped: Shipped) -> None:
    assert sample(shipped, 5, 12, 77, 1.0) == sample(shipped, 0, 12, 77, 1.0)


def test_other_seeds_give_other_tokens(shipped: Shipped) -> None:
    tokens = sample(shipped, 5, 16, 77, 1.0)
    assert len({tuple(some) for some in tokens}) > 8


def test_one_request_seed_does_not_touch_another(shipped: Shipped) -> None:
    prompt = tuple(shipped.tokenizer.encode_prompt(PROMPT))
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    a = Request("a", prompt, params, (), 5)
    engine = shipped.engine()
    alone = run(engine, [a])[0]
    for seed in (6, 7):
        beside = run(engine, [replace(a, id="b", seed=seed), a])
        assert beside[1] == alone
