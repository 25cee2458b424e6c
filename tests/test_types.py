"""Sampling parameters: every bad value is refused by name, and good ones at the edges are not."""

from __future__ import annotations

from typing import Any

import pytest

from legato.types import Grammar, ParameterError, SamplingParams

NAN, INFINITE = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, 1.5, "5", True)),
    *(("temperature", value) for value in (-0.1, 101.0, NAN, INFINITE, "1", None)),
    *(("top_k", value) for value in (-1, 1.5, "3", None, 2**40)),
    *(("top_p", value) for value in (0.0, -1.0, 1.1, NAN, None)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, "0")),
    *(("seed", value) for value in (-1, 2**63, 1.0, "7")),
    *(("stop", value) for value in ("text", ("",), (1,))),
    *(("stop_token_ids", value) for value in ((-1,), (1.5,), tuple(range(9)), ("a",))),
    *(("logprobs", value) for value in (-1, 21, 10**6, True, 1.0)),
    *(("prompt_logprobs", value) for value in (-1, 21, "1")),
    *(("n", value) for value in (0, -1, 129, 10**9, None, 1.0)),
    *(("min_tokens", value) for value in (-1, 1.5, None, "1")),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, None, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, INFINITE, None)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, 10.1, NAN, None)),
    *(("logit_bias", value) for value in ({-1: 1.0}, {1: 101.0}, {1: -100.5}, {1: NAN}, {1: "a"}, {"x": 1.0})),
    *(("allowed_token_ids", value) for value in ((), (-1,), ("a",))),
    *(("bad_token_ids", value) for value in ((-5,), (None,))),
    *(("json_schema", value) for value in ("{", 5, ["a"], {"a": {1, 2}}, {"a": NAN})),
    *(("regex", value) for value in (5, {})),
    *(("grammar", value) for value in (5, {})),
    *(("grammar_after", value) for value in (-1, "</think>", 5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.name == name and str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("allowed_token_ids", {"allowed_token_ids": (1, 2), "bad_token_ids": (2, 1)}),
        ("regex", {"json_schema": {}, "regex": "a"}),
        ("grammar", {"regex": "a", "grammar": "start: /a/"}),
        ("ignore_eos", {"regex": "a", "ignore_eos": True}),
    ],
)
def test_fields_that_do_not_go_together(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**values)
    assert caught.value.name == name


def test_edges_are_allowed() -> None:
    SamplingParams(
        max_tokens=1, temperature=100, top_p=1, min_p=1, seed=2**63 - 1, logprobs=20, prompt_logprobs=0, n=128,
        min_tokens=1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=10, logit_bias={0: -100, 5: 100},
        allowed_token_ids=(1, 2), bad_token_ids=(2,), stop_token_ids=(3,),
    )  # fmt: skip
    SamplingParams(temperature=0, max_tokens=None, seed=None, logprobs=None)


def test_the_one_grammar() -> None:
    assert SamplingParams().constraint is None
    assert SamplingParams(json_schema={"type": "ö"}).constraint == Grammar("json_schema", '{"type": "ö"}')
    assert SamplingParams(json_schema=' {"a" : 1}').constraint == Grammar("json_schema", '{"a": 1}')
    assert SamplingParams(regex="a", grammar_after=3).constraint == Grammar("regex", "a", 3)
    assert SamplingParams(grammar="start: /a/").constraint == Grammar("grammar", "start: /a/")
