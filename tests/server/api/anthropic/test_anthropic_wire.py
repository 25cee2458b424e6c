"""/v1/messages over a real socket, with a scripted engine: blocks, events, thinking, tools, errors in Anthropic's form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from legato.server.api.service import ModelText
from legato.server.engine.client import EngineFailed, RequestRefused
from legato.server.settings import ServerSettings
from tests.server.scripted import Server, aborting, named_events

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
CALL = "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>b</arg_key><arg_value>x y</arg_value></tool_call>"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
PLAIN = "The answer is 5. <|user|>"
THINKING = {"type": "enabled", "budget_tokens": 2000}


class Messages(Server):
    """A server and a client that speaks Anthropic's dialect."""

    def ask(self, path: str = "/v1/messages", **fields: Any) -> Any:
        body = {
            "model": "glm-5.2[1m]",
            "messages": HI,
            **({"max_tokens": 64} if path == "/v1/messages" else {}),
            **fields,
        }
        return self.http.post(f"{path}?beta=true", json=body, headers={"anthropic-version": "2026-10-21"})

    def message(self, **fields: Any) -> dict[str, Any]:
        reply = self.ask(**fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        return named_events(self.ask(stream=True, **fields))

    def refusal(self, status: int, **fields: Any) -> str:
        reply = self.ask(**fields)
        assert reply.status_code == status, reply.text
        body = reply.json()
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
        return body["error"]["message"]


@pytest.fixture(scope="module")
def shared(small_text: ModelText) -> Iterator[Messages]:
    server = Messages(small_text, ServerSettings())
    yield server
    server.close()


@pytest.fixture
def server(shared: Messages) -> Messages:
    shared.reset()
    shared.said = "<think>Let me see.</think>The answer is 5. <|user|>"
    return shared


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as a client puts them together; checks the order of events on the way."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                pieces, is_open = [], True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                kind = delta.pop("type")
                (field, text), *_ = delta.items()
                if kind == "input_json_delta":
                    pieces.append(text)
                    continue
                blocks[-1][field] += text
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads("".join(pieces) or "{}")
            case _:
                pass
    assert not is_open
    return blocks


def test_a_reply_without_thinking_is_text_first(server: Messages) -> None:
    """The API reasons only where it is asked to: clients read `content[0].text`."""
    server.said = PLAIN
    message = server.message()
    assert message["content"] == [{"type": "text", "text": "The answer is 5. "}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "glm-5.2[1m]")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg-")
    prompt = server.text.tokenizer.decode(server.engine.seen[0].prompt)
    assert prompt.rstrip().endswith("</think>"), "the template's switch for reasoning is off"


def test_thinking_is_a_block_of_its_own_and_has_a_budget(server: Messages) -> None:
    message = server.message(thinking=THINKING)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0] == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
    assert server.engine.seen[0].params.reasoning_budget == 2000


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_stream_says_what_a_whole_reply_says(server: Messages, width: int, tools: Any) -> None:
    server.width = width
    server.said = f"<think>Hm.</think>I add. {CALL if tools else ''}<|user|>"
    fields = {"thinking": {"type": "adaptive"}} | ({"tools": tools} if tools else {})
    message, events = server.message(**fields), server.events(**fields)
    server.width = 3
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    blocks = assembled(events)
    for ours, theirs in zip(blocks, message["content"], strict=True):
        assert {key: value for key, value in ours.items() if key != "id"} == {
            key: value for key, value in theirs.items() if key != "id"
        }
    assert end["delta"] == {"stop_reason": message["stop_reason"], "stop_sequence": None}
    assert end["usage"] == message["usage"]
    if tools:
        assert blocks[-1]["input"] == {"a": 7, "b": "x y"} and message["stop_reason"] == "tool_use"


def test_ends_are_told_in_this_apis_words(server: Messages) -> None:
    server.said = PLAIN
    message = server.message(stop_sequences=["answer", "zzz"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "answer")
    assert message["content"] == [{"type": "text", "text": "The "}]
    assert server.message(max_tokens=3)["stop_reason"] == "max_tokens"
    server.said = "words that never end"
    assert server.message(max_tokens=5000)["stop_reason"] == "model_context_window_exceeded"


def test_what_agents_recover_from_is_told_in_the_words_that_they_look_for(server: Messages) -> None:
    """Claude Code takes out an image at the place that is named, and compacts a conversation by the two numbers."""
    place = re.compile(r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+image")
    messages = [*HI, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]
    match = place.search(server.refusal(400, messages=messages, system="s"))
    assert match is not None and match.groups() == ("1", "1")
    long = server.refusal(400, messages=[{"role": "user", "content": "many words " * 400}])
    told = re.search(r"prompt is too long[^0-9]*(\d+) tokens > (\d+)", long)
    assert told is not None and int(told[1]) > 512 and told[2] == "511"


def test_the_data_of_a_picture_is_no_text(server: Messages) -> None:
    """A screenshot of a megabyte in a result would be more than the context holds, if it were one."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 10_000}}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [picture]}]}
    assert server.message(messages=[*HI, call, result], tools=[TOOL])["usage"]["input_tokens"] < 400


def test_a_call_that_is_cut_has_no_input_and_a_reason(server: Messages) -> None:
    server.said = CALL.removesuffix("</arg_value></tool_call>")
    ids = server.text.tokenizer.encode_template(server.said)
    message = server.message(tools=[TOOL], max_tokens=len(ids) - 1)
    assert message["stop_reason"] == "max_tokens" and message["content"][-1]["input"] == {}


def test_a_conversation_with_tools_and_thinking_is_rendered(server: Messages) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add them", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should add.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "eleven"}]},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=77;"},
        {"type": "text", "text": "Be brief."},
    ]
    server.message(messages=messages, tools=[TOOL], system=system)
    prompt = server.text.tokenizer.decode(server.engine.seen[0].prompt)
    assert "eleven" in prompt and "Be brief." in prompt and "add them" in prompt and "billing" not in prompt


def test_tokens_are_counted_as_the_prompt_has_them(server: Messages) -> None:
    fields = {"system": "Be brief.", "tools": [TOOL], "thinking": THINKING}
    server.message(**fields)
    counted = server.ask("/v1/messages/count_tokens", **fields)
    assert counted.status_code == 200 and counted.json() == {"input_tokens": len(server.engine.seen[0].prompt)}


@pytest.mark.parametrize(
    ("choice", "tool_choice", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add"}, "required", True),
    ],
)
def test_tool_choices(server: Messages, choice: Any, tool_choice: str, parallel: bool) -> None:
    from legato.server.api.anthropic.request import PromptRequest

    request = PromptRequest(model="m", messages=HI, tools=[TOOL], tool_choice=choice)
    tools = request.openai_tools()
    assert tools is not None and (tools.choice, tools.parallel) == (tool_choice, parallel)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}], "system": "s"},
            "messages[0].content[0].image: only text",
        ),
        ({"messages": [{"role": "user", "content": "many words " * 400}]}, "prompt is too long: "),
        ({"messages": [{"role": "robot", "content": "hi"}], "system": "s"}, "messages[0].role"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"max_token": 3}, "did you mean max_tokens"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"output_config": {"effort": "huge"}, "thinking": THINKING}, "reasoning_effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "robot"}}}}, "output_config.format"),
    ],
)
def test_bad_fields_are_named(server: Messages, fields: dict[str, Any], told: str) -> None:
    assert told in server.refusal(400, **fields)
    assert server.message()["stop_reason"] == "end_turn", "the next request is served"


def test_what_agents_send_is_taken(server: Messages) -> None:
    message = server.message(
        metadata={"user_id": "u"}, temperature=1, service_tier="auto", thinking={"type": "adaptive"},
        output_config={"effort": "high"}, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}], tool_choice={"type": "auto"},
    )  # fmt: skip
    assert message["stop_reason"] == "end_turn"


def test_faults_come_in_this_apis_form(server: Messages) -> None:
    server.engine.fault = RequestRefused("queue_full", "", "16 wait already")
    assert server.ask().headers["retry-after"] and server.refusal(429) == "16 wait already"
    server.engine.fault, server.engine.fault_at = EngineFailed("secret"), 1
    events = server.events()
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"
    assert "secret" not in json.dumps(events) and events[0]["type"] == "message_start"


def test_an_aborted_answer_is_no_answer(server: Messages) -> None:
    """Where an operator aborts, this API has no stop reason: the error says so."""
    server.engine.step_s = 0.05
    server.said = "<think>" + "on and on " * 200
    with aborting(server, 2):
        assert "aborted" in server.refusal(503, max_tokens=400)


def test_a_fault_within_a_stream_names_its_request(server: Messages) -> None:
    server.engine.fault, server.engine.fault_at = EngineFailed("at /home/me/secret.py"), 2
    body = {"model": "glm", "max_tokens": 50, "messages": HI, "stream": True}
    reply = server.http.post("/v1/messages", json=body, headers={"x-request-id": "mine-1"})
    last = named_events(reply)[-1]
    assert (last["type"], last["request_id"]) == ("error", "mine-1") and "secret" not in reply.text


def test_a_schema_that_the_engine_refuses_is_told_by_its_field(server: Messages) -> None:
    server.engine.fault = RequestRefused("invalid", "json_schema", "json_schema: too big")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    body = {
        "model": "glm",
        "max_tokens": 5,
        "messages": HI,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    for stream in (False, True):
        reply = server.http.post("/v1/messages", json={**body, "stream": stream})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "output_config.format.schema: too big"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("block", ["AAA", None, 3, ["a"]])
def test_a_block_is_an_object(server: Messages, path: str, block: Any) -> None:
    body = {"model": "glm", "messages": [{"role": "user", "content": [block]}]}
    reply = server.http.post(path, json={**body, "max_tokens": 5} if path == "/v1/messages" else body)
    assert reply.status_code == 400 and "messages[0].content[0]" in reply.json()["error"]["message"]
