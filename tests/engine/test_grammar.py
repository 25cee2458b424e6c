"""Grammars on the shipped checkpoint: the answer fits, and drafts change none of its tokens, reasoning first or not."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from legato.engine.loop import Engine
from legato.llm import LLM, vocabulary_of
from legato.runtime.grammar import Grammars
from legato.schedule import Request
from legato.types import ParameterError, SamplingParams
from tests.engine.conftest import Shipped, by_name, run

LENGTH = 48
NEWLINE = 198
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 9999}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
PHONE = r"\+[0-9]{2} [0-9]{3}-[0-9]{4}( or (mail|never))?"
LARK = 'start: "[" [item ("," item)*] "]"\nitem: /[a-c]{1,3}/'
KINDS = {
    "schema": {"json_schema": SCHEMA, "logit_bias": {NEWLINE: -100}},
    "regex": {"regex": PHONE},
    "lark": {"grammar": LARK},
    "regex behind a newline": {"regex": PHONE, "grammar_after": NEWLINE, "logit_bias": {NEWLINE: 6.0}},
    "regex and penalties": {"regex": PHONE, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "regex and min_tokens": {"regex": "(abc ){1,9}", "min_tokens": 12},
    "bans that leave nothing": {"regex": "xyz", "bad_token_ids": tuple(range(64, 120)), "min_tokens": 30},
    "none": {},
}
PROMPT = "def parse(self, text):\n    return "


@pytest.fixture(scope="module")
def grammars(shipped: Shipped) -> Grammars:
    return Grammars(vocabulary_of(shipped.tokenizer, shipped.spec.vocab_size))


def engine_of(shipped: Shipped, grammars: Grammars, **changes: object) -> Engine:
    engine = shipped.engine(**changes)
    engine.runner.grammars = grammars
    return engine


def batch_of(shipped: Shipped, temperature: float) -> list[Request]:
    prompt, ends = tuple(shipped.tokenizer.encode_prompt(PROMPT)), tuple(shipped.tokenizer.stop_ids)
    return [
        Request(name, prompt, SamplingParams(max_tokens=LENGTH, temperature=temperature, **fields), ends, 23)
        for name, fields in KINDS.items()
    ]


@pytest.fixture(scope="module")
def plain(shipped: Shipped, grammars: Grammars, temperature: float) -> dict[str, list[int]]:
    return by_name(engine_of(shipped, grammars, num_drafts=0, max_running=3), batch_of(shipped, temperature))


@pytest.fixture(scope="module")
def drafted(shipped: Shipped, grammars: Grammars, temperature: float) -> tuple[Engine, dict[str, list[int]]]:
    engine = engine_of(shipped, grammars, num_drafts=5, overlap=True)
    return engine, by_name(engine, batch_of(shipped, temperature))


@pytest.mark.parametrize("name", list(KINDS))
def test_drafts_change_nothing(
    plain: dict[str, list[int]], drafted: tuple[Engine, dict[str, list[int]]], name: str
) -> None:
    assert drafted[1][name] == plain[name]


def test_drafts_follow_the_grammar(drafted: tuple[Engine, dict[str, list[int]]]) -> None:
    """Forced text is drafted right, so it is accepted several tokens at a time."""
    assert sum(drafted[0].stats.accepted_at[3:]) >= 3


def test_the_text_fits(shipped: Shipped, plain: dict[str, list[int]]) -> None:
    ends = shipped.tokenizer.stop_ids

    def text(name: str) -> str:
        tokens = plain[name]
        assert tokens[-1] in ends, f"{name} did not end: {shipped.tokenizer.decode(tokens)!r}"
        return shipped.tokenizer.decode(tokens)

    assert isinstance(json.loads(text("schema"))["answer"], int)
    assert re.fullmatch(PHONE, text("regex")) and re.fullmatch(PHONE, text("regex and penalties"))
    assert re.fullmatch(r"\[([a-c]{1,3}(,[a-c]{1,3})*)?\]", text("lark"))
    tokens = plain["regex behind a newline"]
    assert re.fullmatch(PHONE, shipped.tokenizer.decode(tokens[tokens.index(NEWLINE) + 1 :]))
    assert re.fullmatch("(abc ){1,9}", text("regex and min_tokens")) and len(plain["regex and min_tokens"]) > 12
    assert text("bans that leave nothing") == "xyz"


def test_reasoning_ends_at_any_place_of_an_iteration(
    shipped: Shipped, grammars: Grammars, plain: dict[str, list[int]], temperature: float
) -> None:
    """The device's drafts are replaced by the true continuation: in the n-th row the boundary lies at the n-th place of an
    accepted run."""
    asked, truth = batch_of(shipped, temperature)[3], plain["regex behind a newline"]
    engine, places = engine_of(shipped, grammars, num_drafts=5), range(6)
    rows, boundary, prompt_len = engine.runner.rows, truth.index(NEWLINE), len(asked.prompt)

    def overwrite() -> None:
        for place in places:
            at = int(rows.lengths[1 + place]) - prompt_len + 1  # the first draft's place in the answer
            drafts = (truth[at : at + 5] + [0] * 5)[:5] if at > 0 else []
            wrong = max(0, boundary - place - at) if at <= boundary - place else 5
            for depth, token in enumerate(drafts):
                rows.tokens[1 + place, 1 + depth] = token if depth < wrong else (token + 99) % 8000

    batch = [replace(asked, id=f"place {place}") for place in places]
    assert run(engine, batch, overwrite) == [truth] * len(places)


def test_preemption_changes_nothing(
    shipped: Shipped, grammars: Grammars, plain: dict[str, list[int]], temperature: float
) -> None:
    names = ("schema", "lark", "regex behind a newline", "regex and penalties")
    engine = engine_of(shipped, grammars, num_drafts=5, overlap=True)
    turns = iter(range(1000))

    def preempt() -> None:
        if next(turns) in (2, 4, 5):
            for name in names:
                engine.preempt(name)

    batch = [request for request in batch_of(shipped, temperature) if request.id in names]
    assert run(engine, batch, preempt) == [plain[request.id] for request in batch]
    assert engine.stats.preemptions >= 8


def test_generate_chat_and_errors(llm: LLM) -> None:
    params = SamplingParams(json_schema=SCHEMA, max_tokens=60, seed=3, bad_token_ids=(NEWLINE,))
    assert set(json.loads(llm.generate("The answer: ", params)[0].text)) == {"answer", "sure"}
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    answer = llm.chat(messages, params, enable_thinking=False)
    assert set(json.loads(answer.text)) == {"answer", "sure"}
    end = llm.tokenizer.control["</think>"]
    thinking = llm.chat(messages, replace(params, logit_bias={end: 9.0}, max_tokens=120), enable_thinking=True)
    before, _, content = thinking.text.partition("</think>")
    assert set(json.loads(content)) == {"answer", "sure"} and not before.startswith("{")
    for bad in ({"regex": "("}, {"json_schema": {"type": "nothing"}}, {"grammar": "nonsense"}):
        with pytest.raises(ParameterError) as caught:
            llm.generate(["a", "b"], [SamplingParams(max_tokens=4), SamplingParams(**bad)])
        assert caught.value.name == next(iter(bad))
    assert llm.generate("The answer: ", params)[0].token_ids


def test_ids_outside_the_vocabulary_are_refused_by_name(llm: LLM) -> None:
    for name, value in {
        "stop_token_ids": (8192,), "allowed_token_ids": (3, 9000), "bad_token_ids": (8192,), "logit_bias": {8192: 1.0},
    }.items():  # fmt: skip
        with pytest.raises(ParameterError) as caught:
            llm.generate("a", SamplingParams(**{name: value}))
        assert caught.value.name == name
    with pytest.raises(ParameterError) as caught:
        next(llm.stream("a", SamplingParams(n=2)))
    assert caught.value.name == "n"


def test_an_engine_without_a_tokenizer_refuses_a_grammar(shipped: Shipped) -> None:
    engine = shipped.engine(num_drafts=0)
    with pytest.raises(ParameterError) as caught:
        engine.submit(Request("a", (1, 2), SamplingParams(regex="a"), (), 0))
    assert caught.value.name == "regex" and not engine.has_work


def test_several_samples_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=6, ignore_eos=True)
    samples = llm.generate(["def f(", "import "], params)
    assert len(samples) == 6 and len({sample.token_ids for sample in samples[:3]}) == 3
    assert samples == llm.generate(["def f(", "import "], params)
    assert samples[0] == llm.generate("def f(", replace(params, n=1))[0]
