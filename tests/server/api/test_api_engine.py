"""Requests to a real engine: scores as evaluation tools ask for them, formats under drafts, and bad input that harms nobody."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server.live import Live

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(real: Live) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real.url, timeout=120) as client:
        yield client


def test_scores_of_token_ids_do_not_depend_on_their_batch(http: httpx2.Client) -> None:
    prompts = [list(range(300, 330)), [5, 6, 7], list(range(300, 320))]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    together = http.post("/v1/completions", json=body).json()["choices"]
    for choice, prompt in zip(together, prompts):
        scores, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(scores) == len(tops) == len(prompt) + 1 and scores[0] is None
        assert all(math.isfinite(score) and score <= 0 for score in scores[1:])
        assert all(score in top.values() and score <= max(top.values()) for score, top in zip(scores[1:], tops[1:]))
    alone = http.post("/v1/completions", json={**body, "prompt": prompts[1], "max_tokens": 0}).json()["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == together[1]["logprobs"]["token_logprobs"][:-1]
    assert together[0]["logprobs"]["token_logprobs"][1:20] == together[2]["logprobs"]["token_logprobs"][1:20]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("format", "pattern"),
    [
        ({"type": "json_object"}, r"\{.*\}"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"n": {"type": "integer"}},
          "required": ["n"], "additionalProperties": False}}}, r'\{\s*"n":\s*-?\d+\s*\}'),
        ({"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"type": "grammar", "grammar": 'start: "yes" | "no"'}, "yes|no"),
    ],
)  # fmt: skip
def test_formats_hold_behind_reasoning_and_without(
    http: httpx2.Client, format: Any, pattern: str, thinks: bool
) -> None:
    effort: Any = {"thinking_token_budget": 4} if thinks else {"reasoning_effort": "none"}
    body = {"messages": HI, "response_format": format, "seed": 4, "max_tokens": 24, **effort}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"], re.DOTALL), choice
    else:
        assert format["type"].startswith("json") and choice["message"]["content"].startswith("{")
    assert bool(choice["message"].get("reasoning")) == thinks


def test_accept_length_stands_where_benchmarks_look_for_it(http: httpx2.Client) -> None:
    http.post("/flush_cache")
    assert http.get("/server_info").json()["internal_states"][0]["avg_spec_accept_length"] is None
    body = {
        "text": "import os\nimport ",
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    }
    assert http.post("/generate", json=body).json()["meta_info"]["completion_tokens"] == 24
    assert http.get("/server_info").json()["internal_states"][0]["avg_spec_accept_length"] >= 1
    again = http.post("/generate", json={**body, "text": "x" * 200}).json()["meta_info"]
    assert again["cached_tokens"] == 0
    assert http.post("/generate", json={**body, "text": "x" * 200}).json()["meta_info"]["cached_tokens"] >= 64


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NESTED = "[" * 500 + "]" * 500
BAD: list[tuple[str, Any, int, str]] = [
    *[(CHAT, {"messages": HI, name: value}, 400, name) for name, values in {
        "temperature": (-1, 1e9, "1", True, []), "top_p": (0, -0.1, 1.1, "x"), "top_k": (-2, 1.5, 2**40), "min_p": (-0.1, 2),
        "max_tokens": (0, -1, 1.5, 10**9, 10**30, "9"), "n": (0, -1, 129, 1.5), "seed": (1.5, 2**64, "a"),
        "stop": (5, [""], ["a"] * 17, [1], "", ["a" * 2000]), "presence_penalty": (-2.1, 3), "frequency_penalty": (9, "1"),
        "repetition_penalty": (0, -1, 11), "logit_bias": ({"8192": 1}, {"x": 1}, {"1": 101}, {"-1": 1}, [1], {"1": "a"}),
        "stop_token_ids": ([-1], [8192 * 2**20], list(range(9)), 5), "logprobs": (5, "yes"), "top_logprobs": (21, -1, 5),
        "min_tokens": (-1, 10**9), "response_format": ({}, {"type": "xml"}, {"type": "json_schema"}, "json"),
        "tools": ([{}], [5], "x", [{"type": "function", "function": {"name": "a b"}}]), "tool_choice": ("required", 5, "maybe"),
        "reasoning_effort": ("extreme", 5), "chat_template_kwargs": ({"enable_thinkin": False}, [1]),
        "thinking_token_budget": (-1, 0.5), "stream": ("yes", 1), "stream_options": ({"include": True}, []),
        "priority": ("high",), "timeout": (0, -1), "audio": ({"voice": "x"},), "functions": ([],), "store": (True,),
        "best_of": (2,), "nonsense": (1,),
        "allowed_token_ids": ([], [9000]), "cache_salt": (5,), "modalities": (["audio"],), "prompt_logprobs": (1,),
    }.items() for value in values],
    *[(CHAT, {"messages": value}, 400, "messages") for value in (
        None, [], {}, "hi", [5], [{}], [{"role": "king", "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "word " * 3000}],
    )],
    *[(TEXT, {"prompt": value}, 400, "prompt") for value in (
        None, [], 5, [[]], [-1], [8192], [1.5], ["a", 5], [[1], "a"], "word " * 3000, list(range(2048)), {},
    )],
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (TEXT, {"prompt": "a", "max_tokens": 2048}, 400, "max_tokens"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, 400, "n"),
    ("/generate", {"text": "a", "input_ids": [1]}, 400, "text"),
    ("/generate", {"sampling_params": {"max_new_token": 4}, "text": "a"}, 400, "sampling_params"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [8192]}, 400, "tokens"),
    ("/abort_request", {}, 400, "rid"),
]  # fmt: skip


def test_bad_fields_are_named_and_harm_nobody(http: httpx2.Client) -> None:
    wrong: list[str] = []
    for path, body, status, name in BAD:
        limit = {"max_tokens": 1} if path in (CHAT, TEXT) and name not in ("max_tokens", "min_tokens") else {}
        reply = http.post(path, json={**limit, **body})
        error = reply.json().get("error", {})
        is_named = re.split(r"[.\[]", error.get("param") or "")[0] == name and name in error["message"]
        is_too_long = name in ("max_tokens", "messages") and error.get("code") == "context_length_exceeded"
        if reply.status_code != status or not (is_named or is_too_long):
            wrong.append(f"{path} {json.dumps(body)[:80]}: {reply.status_code} {reply.text[:200]}")
    assert not wrong, "\n".join(wrong)
    good = http.post(CHAT, json={"messages": HI, "max_tokens": 2, "temperature": None, "stop": None, "audio": None})
    assert good.status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "required"), (b"{", "JSON"), (b"[]", "object"), (b"5", "object"), (b"null", "object"), (b"\xff\xfe", "JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"), (b'{"temperature": NaN}', "JSON"),
        (b'{"temperature": 1e999}', "JSON"), (b'{"temperature": Infinity}', "JSON"), (b"[" * 1_000_000, "nested"),
        (b'{"a":' * 100_000, "nested"), (b'{"max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + NESTED.encode() + b"}", "tools"),
        (b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": ' + NESTED.encode() + b"}}", "a"),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": '
         b'{"schema": {"a":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}}}", "response_format"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [' + b'"a",' * 1_000_000 + b'"a"]}', "stop"),
    ],
)  # fmt: skip
def test_bad_bodies_are_400_and_quick(http: httpx2.Client, body: bytes, words: str) -> None:
    reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text[:300]
    assert reply.elapsed.total_seconds() < 60, (
        "a second on a quiet machine; none of them may take longer the longer it is"
    )
    assert http.get("/health").status_code == 200


def test_what_a_page_could_send_unasked_is_refused(http: httpx2.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = http.post(CHAT, content=json.dumps({"messages": HI}), headers={"content-type": kind})
        assert reply.status_code == 415 and reply.json()["error"]["code"] == "unsupported_media_type"


def test_ten_megabytes_of_prompt_are_refused_by_their_length(http: httpx2.Client) -> None:
    reply = http.post(TEXT, json={"prompt": "word " * 2_000_000})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


def test_gauges_are_empty_at_the_end(http: httpx2.Client) -> None:
    end = time.monotonic() + 60
    while (state := http.get("/server_info").json()["internal_states"][0])["running"] or state["waiting"]:
        assert time.monotonic() < end
        time.sleep(0.05)
