"""The reasoning budget on the shipped checkpoint: the end comes at its place exactly, and drafts change none of the tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from legato.llm import LLM, vocabulary_of
from legato.runtime.grammar import Grammars
from legato.schedule import Request
from legato.types import ParameterError, SamplingParams
from tests.engine.conftest import Shipped, run

LENGTH = 10
PROMPT = "def parse(self, text):\n    return "
NEWLINE = 198
"""A token that the model says often, so that reasoning also ends by itself."""


@pytest.fixture(scope="module")
def grammars(shipped: Shipped) -> Grammars:
    return Grammars(vocabulary_of(shipped.tokenizer, shipped.spec.vocab_size))


def cases(end: int) -> dict[str, SamplingParams]:
    """Requests that share a batch, greedy and sampled: budgets within a window and beyond, alone and with other controls."""
    plain = SamplingParams(max_tokens=LENGTH, reasoning_end=end)
    greedy = replace(plain, temperature=0.0)
    held = {"reasoning_budget": 5, "logit_bias": {end: -100.0}}
    return {
        "none": replace(plain, reasoning_end=None),
        **{f"budget {budget}": replace(plain, reasoning_budget=budget) for budget in (0, 1, 4)},
        "greedy": replace(greedy, reasoning_budget=8),
        "ends by itself": SamplingParams(max_tokens=LENGTH, reasoning_budget=9, reasoning_end=NEWLINE),
        "banned": replace(greedy, **held),
        "not allowed": replace(greedy, reasoning_budget=3, allowed_token_ids=tuple(range(300, 900))),
        "regex behind it": replace(plain, reasoning_budget=6, regex="[0-9]{3}(abc)+z", grammar_after=end),
    }


def tokens_of(
    shipped: Shipped,
    grammars: Grammars,
    num_drafts: int,
    *,
    overlap: bool = True,
    chosen: Sequence[str] = (),
) -> dict[str, list[int]]:
    engine = shipped.engine(num_drafts=num_drafts, overlap=overlap)
    engine.runner.grammars = grammars
    prompt, ends = tuple(shipped.tokenizer.encode_prompt(PROMPT)), tuple(shipped.tokenizer.stop_ids)
    params = {name: case for name, case in cases(end_of(shipped)).items() if not chosen or name in chosen}
    batch = [Request(name, prompt, case, ends, 7) for name, case in params.items()]
    return dict(zip(params, run(engine, batch), strict=True))


def end_of(shipped: Shipped) -> int:
    return shipped.tokenizer.control["</think>"]


@pytest.fixture(scope="module")
def plain(shipped: Shipped, grammars: Grammars) -> dict[str, list[int]]:
    return tokens_of(shipped, grammars, 0, overlap=False)


@pytest.mark.parametrize("num_drafts", [5, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 2, 3, 4, 6, 7))])
def test_drafts_change_nothing(
    shipped: Shipped, grammars: Grammars, plain: dict[str, list[int]], num_drafts: int
) -> None:
    assert tokens_of(shipped, grammars, num_drafts) == plain


def test_reasoning_ends_where_its_budget_does(shipped: Shipped, plain: dict[str, list[int]]) -> None:
    end, free = end_of(shipped), plain["none"]
    assert end not in free and len(free) == LENGTH
    for budget in (0, 1, 4):
        tokens = plain[f"budget {budget}"]
        assert tokens[:budget] == free[:budget], "reasoning itself is as without a budget"
        assert tokens.index(end) == budget and len(tokens) == LENGTH
    assert plain["greedy"].index(end) == 8
    assert plain["banned"].index(end) == 5 and plain["banned"].count(end) == 1
    assert plain["not allowed"].index(end) == 3
    place = plain["ends by itself"].index(NEWLINE)
    assert place == min(9, free.index(NEWLINE) if NEWLINE in free else 9)
    tokens = plain["regex behind it"]
    assert tokens.index(end) == 6
    assert re.match("[0-9]{3}a?", shipped.tokenizer.decode(tokens[7:]))


def test_a_budget_holds_across_a_preemption(shipped: Shipped, grammars: Grammars, plain: dict[str, list[int]]) -> None:
    engine = shipped.engine(num_drafts=3)
    engine.runner.grammars = grammars
    prompt, ends = tuple(shipped.tokenizer.encode_prompt(PROMPT)), tuple(shipped.tokenizer.stop_ids)
    names = ("budget 1", "budget 4", "regex behind it")
    batch = [Request(name, prompt, cases(end_of(shipped))[name], ends, 7) for name in names]
    turns = iter(range(1000))

    def preempt() -> None:
        if next(turns) in (2, 4, 5):
            for name in names:
                engine.preempt(name)

    assert run(engine, batch, preempt) == [plain[name] for name in names]
    assert engine.stats.preemptions >= 3


def test_a_row_forgets_the_budget_of_its_last_owner(shipped: Shipped, grammars: Grammars) -> None:
    alone = tokens_of(shipped, grammars, 3, chosen=["none"])["none"]
    engine = shipped.engine(num_drafts=3, max_running=1)
    prompt, ends = tuple(shipped.tokenizer.encode_prompt(PROMPT)), tuple(shipped.tokenizer.stop_ids)
    every = cases(end_of(shipped))
    # The second has controls of another kind, so that it too goes through the table of controls.
    batch = [
        Request(name, prompt, params, ends, 7)
        for name, params in {"a": every["budget 4"], "b": replace(every["none"], bad_token_ids=(8191,))}.items()
    ]
    batch[0] = replace(batch[0], params=replace(batch[0].params, max_tokens=3))
    assert run(engine, batch)[1] == alone


def test_chat_and_errors(llm: LLM) -> None:
    end = llm.tokenizer.control["</think>"]
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    params = SamplingParams(reasoning_budget=3, max_tokens=12, temperature=0)
    assert llm.chat(messages, params).token_ids.index(end) <= 3
    free = llm.chat(messages, replace(params, reasoning_budget=None), enable_thinking=False)
    assert llm.chat(messages, params, enable_thinking=False) == free, "there is no reasoning to bound"
    with pytest.raises(ParameterError) as caught:
        llm.generate("a", params)
    assert caught.value.name == "reasoning_budget"
    for field in ("reasoning_budget", "reasoning_end"):
        for value in (-1, 1.5, True, "3"):
            with pytest.raises(ParameterError) as caught:
                SamplingParams(**{field: value})
            assert caught.value.name == field
    with pytest.raises(ParameterError, match="reasoning_end: 9000 is not in the vocabulary"):
        llm.generate("a", SamplingParams(reasoning_budget=1, reasoning_end=9000))
