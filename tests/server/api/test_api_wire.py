"""The OpenAI routes over a real socket, with a scripted engine: wire format, faults, refusals and the small routes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from legato.server.api.openai.chat_request import ChatRequest
from legato.server.api.openai.completions import CompletionRequest
from legato.server.engine.client import EngineClosed, EngineFailed, RequestRefused
from legato.server.http import sse
from legato.server.http.validation import known_fields
from legato.server.settings import Replies, ServerSettings
from tests.server.scripted import HI, TOOL, Server, error_of

OWN_ROUTES = (
    "/v1/chat", "/v1/completions", "/v1/responses", "/v1/models",
    "/tokenize", "/generate", "/health", "/ready", "/v1/health", "/ping", "/metrics",
    "/server_info", "/version", "/flush", "/reset", "/abort", "/start", "/stop",
)  # fmt: skip


# -- wire format ------------------------------------------------------------------------------------------------------


def rebuilt(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """A message put together the way clients do it."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for call in value:
                        calls = message.setdefault("tool_calls", [])
                        if call["index"] == len(calls):
                            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                        else:
                            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    message[name] = message.get(name, "") + value
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def test_a_chat_reply_and_its_stream_say_the_same(server: Server) -> None:
    whole = server.chat().json()
    choice, usage = whole["choices"][0], whole["usage"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "The answer is 5. ",
        "reasoning_content": "Hmm, let me see.",
        "reasoning": "Hmm, let me see.",
    }
    assert (
        choice["finish_reason"] == "stop"
        and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    )
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    chunks = server.chunks(stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len(
        {chunk["id"] for chunk in chunks}
    ) == 1
    assert rebuilt(chunks) == {**choice["message"], "finish_reason": "stop"}
    assert chunks[-2]["choices"][0]["delta"] == {}


def test_usage_on_every_chunk_and_none_when_not_asked_for(server: Server) -> None:
    every = server.chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts) and counts[0] == 3
    assert all("usage" not in chunk for chunk in server.chunks())


@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_tool_calls_stream_as_they_are_replied(server: Server, width: int) -> None:
    call = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"
    server.said = f"<think>x</think>Calling.{call}<tool_call>add</tool_call><|observation|>"
    server.width = width
    try:
        whole = server.chat(tools=[TOOL]).json()["choices"][0]
        chunks = server.chunks(tools=[TOOL])
    finally:
        server.width = 3
    calls = whole["message"]["tool_calls"]
    assert [each["function"]["arguments"] for each in calls] == ['{"a": 1, "b": "2"}', "{}"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Calling."
    message = rebuilt(chunks)
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    for each in (*message["tool_calls"], *calls):
        each.pop("id")
    assert message == {**whole["message"], "finish_reason": "tool_calls"}


def test_several_choices_have_seeds_of_their_own(server: Server) -> None:
    whole = server.chat(n=3, seed=5).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len({request.params.seed for request in server.engine.seen}) == 3 and server.engine.seen[0].params.seed == 5
    assert whole["usage"]["completion_tokens"] == 3 * (single := server.chat().json()["usage"])["completion_tokens"]
    assert whole["usage"]["prompt_tokens"] == single["prompt_tokens"]
    chunks = server.chunks(n=3)
    assert all(rebuilt(chunks, index)["content"] == "The answer is 5. " for index in range(3))


def test_logprobs_ids_and_timings(server: Server) -> None:
    whole = server.chat(logprobs=True, top_logprobs=2, return_token_ids=True, timings=True).json()
    choice = whole["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in choice["logprobs"]["content"])
    assert whole["prompt_token_ids"] and whole["timings"]["steps"] > 1 and whole["timings"]["accept_length"] > 1
    chunks = server.chunks(logprobs=True, top_logprobs=2, return_token_ids=True, timings=True)
    streamed = [
        each for chunk in chunks for c in chunk["choices"] for each in (c["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == choice["logprobs"]["content"]
    assert [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])] == choice[
        "token_ids"
    ]
    assert chunks[-1]["timings"]["drafted"] == whole["timings"]["drafted"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_one_field_for_the_reasoning(made: Any, field: Any) -> None:
    server = made(ServerSettings(replies=Replies(reasoning_fields=field)))
    other = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}[field]
    message = server.chat().json()["choices"][0]["message"]
    assert message[field] == "Hmm, let me see." and other not in message
    streamed = rebuilt(server.chunks())
    assert streamed[field] == message[field] and other not in streamed


def test_sampling_fields_arrive_at_the_engine(server: Server) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "seed": 11, "stop_token_ids": [5], "ignore_eos": True,
        "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
        "logit_bias": {"17": -3}, "allowed_token_ids": [1, 2], "bad_token_ids": [2], "max_tokens": 9,
    }  # fmt: skip
    assert server.chat(**fields, priority=3, cache_salt="me", timeout=5).status_code == 200
    seen = server.engine.seen[-1]
    for name, value in fields.items():
        want = {17: -3.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(seen.params, name) == want, name
    assert (seen.priority, seen.cache_salt, seen.timeout_s, seen.stop_ids) == (3, "me", 5, (5,))
    assert server.chat(top_k=-1, seed=-1).status_code == 200
    assert server.engine.seen[-1].params.top_k == 0


def test_defaults_are_the_checkpoints(made: Any) -> None:
    server = made(ServerSettings(defaults=replace(ServerSettings().defaults, temperature=0.7, top_p=0.95)))
    server.chat()
    server.chat(temperature=None, top_p=1.0)
    first, second = (request.params for request in server.engine.seen)
    assert (first.temperature, first.top_p) == (0.7, 0.95) and (second.temperature, second.top_p) == (0.7, 1.0)


def test_a_stop_string_ends_the_engines_request(server: Server) -> None:
    choice = server.chat(stop=["answer", "is"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("The ", "stop", "answer")
    assert len(server.engine.left) == 1 and not server.engine.open


# -- text completions -------------------------------------------------------------------------------------------------


def test_echo_scores_prompts_as_evaluation_tools_read_them(server: Server) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1, "temperature": 0}
    for choice, prompt in zip(server.http.post("/v1/completions", json=body).json()["choices"], prompts):
        arrays = choice["logprobs"]
        assert {len(arrays[name]) for name in arrays} == {len(prompt) + 1}
        assert arrays["token_logprobs"][0] is None and arrays["top_logprobs"][0] is None
        assert arrays["token_logprobs"][1:-1] == [-token / 1000 for token in prompt[1:]]
        assert all(-token / 1000 in top.values() for token, top in zip(prompt[1:], arrays["top_logprobs"][1:]))
        assert choice["text"].startswith(server.text.tokenizer.decode(prompt))
        for token, offset in zip(arrays["tokens"], arrays["text_offset"]):
            assert choice["text"][offset:].startswith(token)
    only = server.http.post("/v1/completions", json={**body, "max_tokens": 0}).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in only["choices"]] == [3, 2]
    assert only["usage"]["completion_tokens"] == 0 and only["choices"][0]["text"] == server.text.tokenizer.decode(
        [1, 2, 3]
    )


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [1, 2], [[1, 2], [3]]])
def test_every_form_of_prompt_streams_as_it_is_replied(server: Server, prompt: Any) -> None:
    fields = {"prompt": prompt, "max_tokens": 7, "n": 2, "logprobs": 0, "echo": True}
    whole = server.http.post("/v1/completions", json=fields).json()
    chunks = server.chunks("/v1/completions", **fields, stream_options={"include_usage": True})
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(whole["choices"]) == 2 * (len(prompt) if several else 1)
    for choice in whole["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert parts[-1]["finish_reason"] == "length" and all(part["finish_reason"] is None for part in parts[:-1])
    assert chunks[-1]["usage"] == whole["usage"]


def test_stop_strings_in_and_out_of_the_text(server: Server) -> None:
    server.said = "one two three<|user|>"
    body = {"prompt": "x", "stop": "two", "max_tokens": 50}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "one "
    kept = server.http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == "one two"


def test_generate_streams_all_of_the_text_so_far(server: Server) -> None:
    server.said = "one two three four<|user|>"
    body = {"text": "x", "sampling_params": {"max_new_tokens": 50, "temperature": 0}, "lora_path": None}
    whole = server.http.post("/generate", json=body).json()
    reply = server.http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in reply if line.startswith("data: {")]
    assert events[-1]["text"] == whole["text"] == "one two three four"
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(events))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["completion_tokens"] == len(whole["output_ids"])


# -- the server itself ------------------------------------------------------------------------------------------------


def test_health_follows_the_engine(server: Server) -> None:
    for state, status in (("ready", 200), ("draining", 503), ("failed", 503)):
        server.engine.state = state
        assert {server.http.get(path).status_code for path in ("/health", "/ready", "/health_generate")} == {status}
        assert server.http.get("/ping").status_code == 200 and server.http.head("/health").status_code == status
    server.engine.state = "ready"


def test_small_routes(server: Server) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert server.http.get("/v1/models/small").json()["id"] == "small"
    assert error_of(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    ids = server.http.post("/tokenize", json={"prompt": "def f():"}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["text"] == "def f():"
    assert server.http.post("/v1/tokenize", json={"messages": HI}).json()["count"] > 3
    assert server.http.get("/server_info").json()["internal_states"][0]["avg_spec_accept_length"] is None
    assert server.http.post("/flush_cache?timeout=60").json() == {"success": True, "pages": 7}
    assert b"legato_" in server.http.get("/metrics").content and server.http.head("/metrics").status_code == 200
    assert error_of(server.http.post("/start_profile"), 403)
    assert error_of(server.http.get("/nowhere"), 404)
    assert error_of(server.http.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/generate", "/generate"),
        ("/v1/embeddings", None),
    ],
)
def test_a_wrong_base_url_is_told_with_the_right_one(server: Server, asked: str, near: str | None) -> None:
    reply = server.http.post(f"{server.live.url}{asked}", json={})
    error = reply.json()["error"]
    assert reply.status_code == 404 and "there is no such route" in error["message"]
    assert (f"did you mean {near}?" in error["message"]) == (near is not None)


def test_a_request_is_aborted_by_the_id_of_its_reply(server: Server) -> None:
    server.engine.step_s, server.said = 0.05, "word " * 400
    with server.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True, "n": 2}) as reply:
        lines = reply.iter_lines()
        id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert httpx2.post(f"{server.live.url}/abort_request", json={"rid": id}).json() == {"aborted": 1}
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {c["finish_reason"] for chunk in rest for c in chunk["choices"]} == {None, "abort"}
    assert httpx2.post(f"{server.live.url}/abort_request", json={"rid": id}).json() == {"aborted": 0}


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (RequestRefused("queue_full", "", "8 requests wait already"), 429, "8 requests wait"),
        (RequestRefused("never_fits", "max_tokens", "11 and 600 are more than 512"), 400, "512"),
        (RequestRefused("invalid", "logit_bias", "logit_bias: no such token"), 400, "no such token"),
        (RequestRefused("draining", "", "about to stop"), 503, "shutting down"),
        (EngineFailed("died at /home/me/secret.py"), 503, "has failed"),
        (ValueError("/home/me/secret.py line 5"), 500, "internal error"),
    ],
)
def test_faults_before_the_first_token_have_a_status(
    server: Server, fault: Any, status: int, words: str, stream: bool
) -> None:
    server.engine.fault = fault
    reply = server.chat(stream=stream)
    error = error_of(reply, status)
    assert words in error["message"] and "secret" not in reply.text
    assert ("retry-after" in reply.headers) == (status == 429 or "shutting" in words)
    server.reset()
    assert server.chat().status_code == 200


def test_a_fault_within_a_stream_is_an_event(server: Server) -> None:
    server.engine.fault, server.engine.fault_at = EngineFailed("at /home/me/secret.py"), 2
    chunks = server.chunks()
    assert "has failed" in chunks[-1]["error"]["message"] and "secret" not in json.dumps(chunks)


def test_a_fault_that_comes_late_and_first_is_an_event_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FIRST_EVENT_S", 0.02)
    server.engine.fault, server.engine.step_s = RequestRefused("queue_full", "", "8 requests wait already"), 0.3
    reply = server.chat(stream=True)
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    assert [event["error"]["type"] for event in events] == ["rate_limit_error"]


def test_a_refusal_has_a_status_however_long_the_iteration_before_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_EVENT_S", 0.02)
    server.engine.fault, server.engine.step_s = RequestRefused("queue_full", "", "8 requests wait already"), 0.3
    server.engine.says_taken = False
    messages = {"model": "glm", "max_tokens": 5, "messages": HI}
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", messages),
        ("/generate", {"text": "a"}),
    ):
        assert server.http.post(path, json={**body, "stream": True}).status_code == 429, path


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "regex", "regex": "a"}}}, "text.format.regex"),
        ("/v1/responses", {"input": "a"}, "tools"),
        ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "regex", "regex": "a"}},
         "response_format.regex"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_engine_refuses_is_told_by_its_field(
    server: Server, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    server.engine.fault = RequestRefused("invalid", "regex", "regex: too big")
    error = error_of(server.http.post(path, json={**fields, "stream": stream}), 400)
    assert (error["param"], error["message"]) == (param, f"{param}: too big")


def test_a_request_that_never_fits_is_told_by_the_names_of_its_api(server: Server) -> None:
    server.engine.fault = RequestRefused("never_fits", "max_tokens", "max_tokens: 600 is more than 512")
    error = error_of(server.http.post("/v1/responses", json={"input": "a"}), 400)
    assert (error["param"], error["message"]) == ("max_output_tokens", "max_output_tokens: 600 is more than 512")


def test_a_server_that_is_stopped_at_once_says_so(server: Server) -> None:
    server.engine.fault = EngineClosed("the engine was closed")
    assert "stopped before the answer" in error_of(server.chat(), 503)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_conversation_has_a_most_number_of_messages(server: Server, path: str) -> None:
    message = {"role": "user", "content": "a"}
    reply = server.http.post(path, json={"model": "x", "max_tokens": 1, "messages": [message] * 20_001})
    assert reply.status_code == 400 and "20000" in reply.text and "messages" in reply.text


def test_the_page_of_the_api_names_every_field_and_route(server: Server) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text()
    missing = [
        name for model in (ChatRequest, CompletionRequest) for name in known_fields(model) if f"`{name}`" not in page
    ]
    assert not missing
    routes = [
        path
        for path in server.http.get("/openapi.json").json()["paths"]
        if path.startswith(OWN_ROUTES) and "." not in path
    ]
    shown = page.replace("{id}", "{model}")
    assert len(routes) > 15 and not [path for path in routes if f"{path}`" not in shown]
