"""Text completions and /generate over a real socket, with a scripted engine: a stream says what the whole reply says."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from legato.server.engine.client import RequestRefused
from tests.server.scripted import TOOL, Server, error_of

PROMPT = list(range(10, 20))


def both(server: Server, **fields: Any) -> tuple[list[Any], list[list[Any]]]:
    """The choices of the whole reply, and of each the parts that a stream brings."""
    reply = server.http.post("/v1/completions", json=fields)
    assert reply.status_code == 200, reply.text
    chunks = server.chunks("/v1/completions", **fields)
    choices = reply.json()["choices"]
    parts = [[part for chunk in chunks for part in chunk["choices"] if part["index"] == n] for n in range(len(choices))]
    return choices, parts


def native_events(server: Server, **body: Any) -> list[Any]:
    lines = server.http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 11])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_the_log_probabilities_of_a_prompt_that_runs_in_chunks(server: Server, chunk: int, max_tokens: int) -> None:
    server.engine.prefill_chunk = chunk
    choices, parts = both(server, prompt=[PROMPT, [7, 8]], n=2, echo=True, logprobs=1, max_tokens=max_tokens)
    for choice, some in zip(choices, parts, strict=True):
        prompt = (PROMPT, [7, 8])[choice["index"] // 2]
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(prompt) + max_tokens}
        assert arrays["token_logprobs"][: len(prompt)] == [None, *(-token / 1000 for token in prompt[1:])]
        for name, values in arrays.items():
            assert [value for part in some for value in part["logprobs"][name]] == values
        assert "".join(part["text"] for part in some) == choice["text"]
        assert some[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_a_choice_that_is_ahead_waits_for_the_scores_of_the_prompt(server: Server) -> None:
    """The second of two choices needs no chunks: it has ended before the first one has its first token."""
    server.engine.prefill_chunk, server.engine.step_s = 1, 0.01
    _, parts = both(server, prompt=PROMPT, n=2, echo=True, logprobs=0, max_tokens=1)
    assert server.engine.seen[-1].params.prompt_logprobs is None
    scores = [None, *(-token / 1000 for token in PROMPT[1:])]
    for some in parts:
        assert [value for part in some for value in part["logprobs"]["token_logprobs"]][:10] == scores
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}
    for event in native_events(server, **body):
        assert [value for value, *_ in event["meta_info"]["input_token_logprobs"]] == scores


def test_a_prompt_of_one_token_has_one_entry(server: Server) -> None:
    (choice,), (parts,) = both(server, prompt=[5], echo=True, logprobs=0, max_tokens=2)
    arrays = choice["logprobs"]
    assert {len(values) for values in arrays.values()} == {3}
    assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None and arrays["token_logprobs"][1] is not None
    for name, values in arrays.items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    body = {"input_ids": [5], "return_logprob": True, "logprob_start_len": 0}
    assert server.http.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"] == [[None, 5, None]]
    assert native_events(server, **body)[-1]["meta_info"]["input_token_logprobs"] == [[None, 5, None]]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_token_ids_of_prompt_and_choices(server: Server, echo: bool, logprobs: int | None, max_tokens: int) -> None:
    fields = {"prompt": [PROMPT, [7, 8]], "n": 2, "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens}
    choices, parts = both(server, **fields, return_token_ids=True)
    for choice, some in zip(choices, parts, strict=True):
        assert len(choice["token_ids"]) == max_tokens
        assert [token for part in some for token in part["token_ids"]] == choice["token_ids"]
        assert some[0]["prompt_token_ids"] == choice["prompt_token_ids"] == (PROMPT, [7, 8])[choice["index"] // 2]
        assert all("prompt_token_ids" not in part for part in some[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_a_running_request_is_refused_and_does_not_touch_it(server: Server, stream: bool) -> None:
    server.engine.step_s, server.said = 0.05, "word " * 400
    body: dict[str, Any] = {"text": "x", "rid": "mine", "sampling_params": {"max_new_tokens": 500}}
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        error = error_of(httpx2.post(f"{server.live.url}/generate", json={**body, "stream": stream}), 400)
        assert error["param"] == "rid" and error["message"].startswith("rid: 'mine' ")
        assert len(server.engine.seen) == 1 and not server.engine.left
        assert httpx2.post(f"{server.live.url}/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    server.engine.step_s, server.said = 0.0, "one<|user|>"
    assert httpx2.post(f"{server.live.url}/generate", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_the_engine_has_not_let_go_is_refused_by_its_name(server: Server, stream: bool) -> None:
    server.engine.fault = RequestRefused("invalid", "id", "id: 'mine/0' is in use by another request")
    body = {"text": "x", "rid": "mine", "stream": stream}
    error = error_of(server.http.post("/generate", json=body), 400)
    assert (error["param"], error["message"]) == ("rid", "rid: 'mine/0' is in use by another request")


@pytest.mark.parametrize("stream", [False, True])
def test_faults_of_generate_are_told_by_its_own_names(server: Server, stream: bool) -> None:
    server.engine.fault = RequestRefused("never_fits", "max_tokens", "the prompt has 9 tokens and max_tokens is 600")
    error = error_of(server.http.post("/generate", json={"text": "x", "stream": stream}), 400)
    name = "sampling_params.max_new_tokens"
    assert (error["param"], error["message"]) == (name, f"the prompt has 9 tokens and {name} is 600")
    server.engine.fault = None
    for sampling, param in (
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "sampling_params.min_new_tokens"),
        ({"stop": ["x", ""]}, "sampling_params.stop[1]"),
        ({"json_schema": "{"}, "sampling_params.json_schema"),
    ):
        body = {"text": "x", "sampling_params": sampling, "stream": stream}
        assert error_of(server.http.post("/generate", json=body), 400)["param"] == param
    assert error_of(server.http.post("/generate", json={"input_ids": [-1]}), 400)["param"] == "input_ids[0]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "response_format", "param"),
    [
        ("regex", {"type": "regex", "regex": "("}, "response_format.regex"),
        ("grammar", {"type": "grammar", "grammar": "x"}, "response_format.grammar"),
        ("json_schema", {"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.schema"),
        ("json_schema", {"type": "json_object"}, "response_format"),
        ("grammar", None, "tools"),
    ],
)
def test_a_grammar_that_the_engine_refuses_is_told_by_the_field_that_asked_for_it(
    server: Server, kind: str, response_format: Any, param: str, stream: bool
) -> None:
    server.engine.fault = RequestRefused("invalid", kind, f"{kind}: cannot be compiled")
    fields = {"response_format": response_format, "stream": stream}
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    for path, body in (("/v1/completions", {"prompt": "x", **fields}), ("/v1/chat/completions", chat)):
        error = error_of(server.http.post(path, json=body), 400)
        assert (error["param"], error["message"]) == (param, f"{param}: cannot be compiled")


def test_a_grammar_beside_tools_is_told_by_its_own_name(server: Server) -> None:
    error = error_of(server.chat(response_format={"type": "grammar", "grammar": "start: /x/"}, tools=[TOOL]), 400)
    assert error["param"] == "response_format.grammar" and "tool_choice" in error["message"]
