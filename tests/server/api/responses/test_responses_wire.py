"""/v1/responses over a real socket, with a scripted engine: items, events, reasoning, tools, log-probabilities, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from legato.server.api.responses.request import ResponsesRequest
from legato.server.api.service import ModelText
from legato.server.engine.client import EngineFailed, RequestRefused
from legato.server.http.errors import ApiError
from legato.server.http.sse import fault_event
from legato.server.http.validation import known_fields
from legato.server.settings import ServerSettings
from tests.server.scripted import Server, aborting, error_of, named_events

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "strict": False,
}
CRM = {
    "type": "namespace", "name": "crm", "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "description": "Finds one.", "defer_loading": False,
               "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
}  # fmt: skip
PATCH: dict[str, Any] = {
    "type": "custom", "name": "patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF /.+/ LF "*** End"\n%import common.LF'},
}  # fmt: skip
EDIT = '*** Begin\n+ say("ü \\\\ </x>")\t\n*** End'
CALL = "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>b</arg_key><arg_value>x y</arg_value></tool_call>"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


class Responses(Server):
    """A server and a client that speaks this dialect."""

    def ask(self, **fields: Any) -> Any:
        return self.http.post("/v1/responses", json={"input": "hi", **fields})

    def response(self, **fields: Any) -> dict[str, Any]:
        reply = self.ask(**fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        found = named_events(self.ask(stream=True, **fields))
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found

    def prompt(self, number: int = -1) -> str:
        return self.text.tokenizer.decode(self.engine.seen[number].prompt)


@pytest.fixture(scope="module")
def shared(small_text: ModelText) -> Iterator[Responses]:
    server = Responses(small_text, ServerSettings())
    yield server
    server.close()


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from request to request: its id, those made of it, those of calls, and times."""
    suffix = response["id"].removeprefix("resp_")
    text = json.dumps({**response, "created_at": 0, "completed_at": 0}).replace(suffix, "ID")
    plain = json.loads(text)
    for item in plain["output"]:
        assert "call" not in item["type"] or item.pop("call_id").startswith("call_")
    return plain


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream, put together from the pieces as clients do; checks the order of events on the way."""
    items: list[dict[str, Any]] = []
    place: dict[str, Any] = {}
    pieces: list[str] = []
    logprobs: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not place and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            place = {"item_id": event["item"]["id"], "output_index": event["output_index"]}
            items.append(event["item"])
            pieces, logprobs = [], []
            continue
        if kind == "output_item.done":
            late = {key: event["item"][key] for key in ("status", "encrypted_content") if key in event["item"]}
            items[-1] |= late
            assert items[-1] == event["item"]
            place = {}
            continue
        assert place and place.items() <= event.items()
        if kind.endswith(".delta"):
            pieces.append(event["delta"])
            logprobs += event.get("logprobs", [])
        elif kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done"):
            assert event["text"] == "".join(pieces) and event.get("logprobs", []) == logprobs
        elif kind == "function_call_arguments.done":
            items[-1]["arguments"] = "".join(pieces)
            assert event["arguments"] == items[-1]["arguments"] and event["name"] == items[-1]["name"]
        elif kind == "custom_tool_call_input.done":
            items[-1]["input"] = "".join(pieces)
            assert event["input"] == items[-1]["input"]
        elif kind in ("content_part.added", "reasoning_summary_part.added"):
            assert event["part"]["text"] == ""
        elif kind in ("content_part.done", "reasoning_summary_part.done"):
            field = "summary" if "summary" in kind else "content"
            assert event["part"]["text"] == "".join(pieces)
            items[-1][field] = [*items[-1][field], event["part"]]
        else:
            pytest.fail(f"an event that no client expects: {kind}")
    assert not place
    return items


def test_a_response_says_what_was_asked_and_what_came(server: Responses) -> None:
    response = server.response(
        instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, reasoning={"effort": "high"}
    )
    assert response["id"].startswith("resp_") and response["object"] == "response"
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    reasoning, message = response["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm, let me see."}]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "The answer is 5. ", "annotations": [], "logprobs": []}
    assert message["content"] == [part] and "encrypted_content" not in reasoning
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert response["metadata"] == {"a": "b"} and response["temperature"] == 0.5 and response["top_p"] == 1.0
    assert response["instructions"] == "Be brief." and response["reasoning"]["effort"] == "high"
    assert (response["tool_choice"], response["tools"], response["store"]) == ("auto", [], False)
    assert "Be brief." in server.prompt() and response["model"] == "small"


SAID = {
    "reasoning and text": "<think>Hm.</think>I think so. <|user|>",
    "calls": f"<think>Hm.</think>I add.{CALL}<tool_call>add</tool_call><|observation|>",
    "text only": "</think>Ünïcode 你好.<|user|>",
    "silent": "<think>All I have to say.<|user|>",
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize(
    "fields",
    [{}, {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"], "tools": [TOOL]}, LOGPROBS],
    ids=["plain", "summary", "carried", "logprobs"],
)
def test_any_cut_of_the_tokens_gives_the_same_response(server: Responses, said: str, fields: dict[str, Any]) -> None:
    """Whole and streamed, however many tokens a step brings."""
    server.said = said
    if "<tool_call>" in said:
        fields = {"tools": [TOOL]} | fields
    finals: list[dict[str, Any]] = []
    try:
        for server.width in (1, 2, 5, 100):
            finals.append(server.response(**fields))
            events = server.events(**fields)
            kinds = [event["type"] for event in events]
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
            finals.append(events[-1]["response"])
            assert rebuilt(events) == finals[-1]["output"]
    finally:
        server.width = 3
    first, *others = map(timeless, finals)
    assert all(other == first for other in others)
    assert first["status"] == "completed" and first["output"]


def test_reasoning_stands_where_the_request_wants_it(server: Responses) -> None:
    """As `content`; as `summary`, which is where many clients look; and once more for those that send back nothing else."""
    both = {"reasoning": {"summary": "detailed"}, "include": ["reasoning.encrypted_content"]}
    item = server.response(**both)["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Hmm, let me see."}] and "content" not in item
    user = {"role": "user", "content": "go on"}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "eleven"}
    plain = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hmm, let me see."}]}
    for sent in (item, {**item, "summary": []}, plain):
        server.response(input=[user, sent, call, output])
        assert "<think>Hmm, let me see.</think><tool_call>add</tool_call>" in server.prompt()
    foreign = error_of(server.ask(input=[user, {**item, "encrypted_content": "gAAAA"}]), 400)
    assert foreign["param"] == "input[1].encrypted_content"
    broken = error_of(server.ask(input=[user, {**item, "encrypted_content": "legato1.%"}]), 400)
    assert broken["param"] == "input[1].encrypted_content"


def test_a_conversation_of_items_is_the_one_that_chat_renders(server: Responses) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
    other = {**call, "call_id": "c2", "arguments": '{"a": 2}', "status": "completed"}
    server.response(
        instructions="Be brief.",
        tools=[TOOL],
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("add ", "them")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I should."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Adding.", "annotations": []}]},
            call,
            other,
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "second"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "first"},
        ],
    )  # fmt: skip
    function = {key: value for key, value in TOOL.items() if key != "type"}
    calls = [
        {"id": each["call_id"], "type": "function", "function": {"name": "add", "arguments": each["arguments"]}}
        for each in (call, other)
    ]
    server.chat(
        tools=[{"type": "function", "function": function}],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "add them"},
            {"role": "assistant", "content": "Adding.", "reasoning_content": "I should.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "first"},
            {"role": "tool", "tool_call_id": "c2", "content": "second"},
        ],
    )
    ours, theirs = (request.prompt for request in server.engine.seen)
    assert ours == theirs


def test_turns_of_the_assistant_are_kept_apart(server: Responses) -> None:
    """Two messages in a row are two turns; reasoning behind text begins a new one."""
    messages = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    later = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    server.response(input=[{"role": "user", "content": "hi"}, *messages, later, {"role": "user", "content": "so?"}])
    assert server.prompt().count("<think>") == 4


def test_log_probabilities_are_those_of_the_text(server: Responses) -> None:
    server.said = f"<think>Hm.</think>So be it.{CALL}<|observation|>"
    response = server.response(tools=[TOOL], **LOGPROBS)
    (message,) = (item for item in response["output"] if item["type"] == "message")
    (part,) = message["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "So be it."
    ids = server.text.tokenizer.encode_template("So be it.")
    assert [entry["logprob"] for entry in part["logprobs"]] == [-token / 1000 for token in ids]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in part["logprobs"])
    assert error_of(server.ask(top_logprobs=2), 400)["param"] == "top_logprobs"
    server.said = "<think>Hm.</think>The end of it all. <|user|>"
    stopped = server.response(stop="of it", **LOGPROBS)["output"][-1]["content"][0]
    assert stopped["text"] == "The end "
    assert "".join(entry["token"] for entry in stopped["logprobs"]).startswith("The end")


def test_ends_are_told_in_this_apis_words(server: Responses) -> None:
    server.said = "<think>Hm.</think>words that never end"
    for fields in ({"max_output_tokens": 6}, {}):
        response = server.response(**fields)
        assert response["status"] == "incomplete" and response["completed_at"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete" and response["output"][0]["status"] == "completed"
    assert server.events(max_output_tokens=6)[-1]["type"] == "response.incomplete"
    server.said = f"</think>{CALL.removesuffix('</arg_value></tool_call>')}"
    ids = server.text.tokenizer.encode_template(server.said)
    call = server.response(tools=[TOOL], max_output_tokens=len(ids) - 1)["output"][-1]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert call["arguments"].startswith('{"a": 7')


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_is_aborted_has_failed(server: Responses, is_streamed: bool) -> None:
    server.engine.step_s = 0.05
    server.said = "<think>" + "on and on " * 200
    with aborting(server, 2):
        response = server.events()[-1]["response"] if is_streamed else server.response()
    assert response["status"] == "failed" and "aborted" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete", "what was said is told"


def test_faults_before_the_answer_have_a_status_and_later_ones_an_event(server: Responses) -> None:
    server.engine.fault = RequestRefused("queue_full", "", "16 wait already")
    for fields in ({}, {"stream": True}):
        reply = server.ask(**fields)
        assert error_of(reply, 429)["message"] == "16 wait already" and reply.headers["retry-after"]
    server.engine.fault, server.engine.fault_at = EngineFailed("secret"), 2
    *events, last = server.events()
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last) and events[-1]["type"] == "response.output_item.done"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert error_of(server.ask(), 503)


def test_a_client_that_goes_away_ends_its_request(server: Responses) -> None:
    server.engine.step_s = 0.02
    server.said = "<think>" + "on and on " * 600
    with server.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 60
    while not server.engine.left and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.left and not server.engine.open


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", ("auto", {"add", "sub"})),
        ("required", ("required", {"add", "sub"})),
        ("none", ("none", set())),
        ({"type": "function", "name": "sub"}, ("required", {"sub"})),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, ("auto", {"add"})),
    ],
)
def test_tool_choices(choice: Any, wanted: Any) -> None:
    request = ResponsesRequest(input="hi", tools=[TOOL, {**TOOL, "name": "sub"}], tool_choice=choice)
    tools = request.function_tools(request.flat_tools())
    assert tools is not None and (tools.choice, set(tools.allowed)) == wanted


def test_one_call_is_all_where_calls_are_not_parallel(server: Responses) -> None:
    server.said = f"</think>{CALL}{CALL}<|observation|>"
    response = server.response(tools=[TOOL], parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert json.loads(response["output"][0]["arguments"]) == {"a": 7, "b": "x y"}
    assert response["status"] == "completed" and response["tools"] == [TOOL] and not response["parallel_tool_calls"]


def test_formats_and_budgets_reach_the_engine(server: Responses) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = server.response(text={"format": made}, thinking_token_budget=9, seed=4, max_output_tokens=50)
    params = server.engine.seen[-1].params
    assert params.constraint is not None and json.loads(params.constraint.text) == schema
    assert (params.reasoning_budget, params.seed, params.max_tokens) == (9, 4, 50)
    assert response["text"] == {"format": made, "verbosity": "medium"}
    server.response(text={"format": {"type": "json_object"}}, reasoning={"effort": "none"})
    assert server.engine.seen[-1].params.constraint is not None and server.prompt().rstrip().endswith("</think>")


MESSAGE = {"role": "user", "content": "hi"}
MADE = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": EDIT}


def grammar(**changes: str) -> dict[str, Any]:
    return {**PATCH, "format": {**PATCH["format"], **changes}}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": 3}, "input", "must be a"),
        ({"input": [0] * 20_001}, "input", "at most 20000 items, got 20001"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "'robot'"),
        ({"input": [MESSAGE, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0].input_image", "text"),
        ({"input": [MESSAGE, {"role": "user", "content": [{"type": "input_audio"}]}]}, "input[1].content[0]", "input_audio"),
        ({"input": [MESSAGE, {**CUSTOM, "input": {}}]}, "input[1].input", "string"),
        ({"input": [MESSAGE, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[1].call_id", "'c'"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text", "string"),
        ({"input": [{"role": "user", "contents": "hi"}]}, "input[0].contents", "did you mean content"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]", "web_search_call"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
        ({"input": [MESSAGE, {"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[1].call_id", "'c'"),
        ({"input": [MESSAGE, {**MADE, "arguments": "{x"}]}, "input[1].arguments", "JSON"),
        ({"input": [MESSAGE, {**MADE, "arguments": "[]"}]}, "input[1].arguments", "object"),
        ({"input": [MESSAGE, {**MADE, "namespace": 3}]}, "input[1].namespace", "string"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "at least one"),
        ({"tools": [{**CRM, "tools": [{"type": "shell", "name": "f"}]}]}, "tools[0].tools[0].type", "shell"),
        ({"tools": [{**CRM, "tools": [{"type": "custom", "name": "f", "format": 3}]}]}, "tools[0].tools[0].format", "object"),
        ({"tools": [CRM, {**TOOL, "name": "crm.find"}]}, "tools[1]", "a second tool"),

        ({"tools": [CRM, {**TOOL, "strict": True, "parameters": {"type": "object"}}]}, "tools[1].parameters", "strict"),
        ({"tools": [TOOL, {**CRM, "tools": [TOOL, {**TOOL, "name": "sub", "parameters": {"type": "array"}}]}]},
         "tools[1].tools[1].parameters.type", "array"),
        ({"tools": [CRM], "tool_choice": {"type": "function", "name": "find"}}, "tool_choice.name", "crm.find"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "false only"),
        ({"store": True}, "store", "false only"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search_call"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "concise"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "robot"}}}}, "text.format.schema", "enforced"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "without spaces"),
        ({"tools": [{"type": "custom", "name": "f", "strict": True}]}, "tools[0].strict", "a custom tool has"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "json"}}]}, "tools[0].format.type", "json"),
        ({"tools": [grammar(syntax="ebnf")]}, "tools[0].format.syntax", "ebnf"),
        ({"tools": [CRM, grammar(definition="start: nothing")]}, "tools[1].format.definition", "cannot be enforced"),
        ({"tools": [grammar(definition='start: "x"\n}\nother: "y"')]}, "tools[0].format.definition", "cannot be enforced"),
        ({"tools": [grammar(syntax="regex", definition="(")]}, "tools[0].format.definition", "cannot be enforced"),
        ({"tools": [TOOL, {**PATCH, "name": "add"}]}, "tools[1]", "a second tool"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "add"}}, "tool_choice.name", "patch"),
        ({"tools": [PATCH], "tool_choice": {"type": "function", "name": "patch"}}, "tool_choice.name", "function tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].custom", "not supported"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "grammar": {}}}]}, "tools[0].format.grammar", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "not supported"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "array"),
        ({"tools": [{**TOOL, "strict": True, "parameters": {"type": "object"}}]}, "tools[0].parameters", "strict"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "sub"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "not supported"),
        ({"n": 2}, "n", "not supported"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(server: Responses, fields: dict[str, Any], param: str, told: str) -> None:
    error = error_of(server.ask(**fields), 400)
    assert error["param"] == param and told in error["message"], error


def test_functions_of_a_namespace_keep_both_their_names(server: Responses) -> None:
    """A model sees one name and is told what the namespace is for; calls leave and come back with both names."""
    server.said = "</think><tool_call>crm.find<arg_key>a</arg_key><arg_value>7</arg_value></tool_call><|observation|>"
    response = server.response(tools=[TOOL, CRM])
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("crm", "find", '{"a": 7}')
    assert response["tools"][1]["type"] == "namespace" and response["tools"][1]["tools"][0]["name"] == "find"
    assert "crm: Customers.\\n\\nFinds one." in server.prompt() and '"crm.find"' in server.prompt()
    server.response(
        input=[MESSAGE, {**call}, {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}],
        tools=[CRM],
    )
    assert "<tool_call>crm.find<arg_key>a</arg_key><arg_value>7</arg_value></tool_call>" in server.prompt()


@pytest.mark.parametrize("width", [1, 3, 100])
@pytest.mark.parametrize("home", ["", "files."])
def test_a_free_form_tool_takes_text(server: Responses, width: int, home: str) -> None:
    """To the model it is a function of one text; its calls leave and come back with the text alone, quotes, tabs and all."""
    tools = [TOOL, {"type": "namespace", "name": "files", "tools": [PATCH]} if home else PATCH]
    written = f"<tool_call>{home}patch<arg_key>input</arg_key><arg_value>{EDIT}</arg_value></tool_call>"
    server.said, server.width = f"</think>{written}<|observation|>", width
    response, events = server.response(tools=tools), server.events(tools=tools)
    assert timeless(events[-1]["response"])["output"] == timeless(response)["output"]
    assert [item["type"] for item in rebuilt(events)] == [item["type"] for item in response["output"]]
    call = response["output"][-1]
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call",
        "patch",
        EDIT,
        "completed",
    )
    assert call.get("namespace") == (home.strip(".") or None) and response["status"] == "completed"
    assert "%import common.LF" in server.prompt() and "Begin" in str(server.engine.seen[-1].params.grammar)
    result = {
        "type": "custom_tool_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "ok!"}],
    }
    server.response(input=[MESSAGE, call, result], tools=tools)
    assert written in server.prompt() and "<tool_response>ok!" in server.prompt()


def test_a_free_form_tool_without_a_format_is_not_held_to_one(server: Responses) -> None:
    """What a model writes instead of the one text is the text; a choice names the tool as its API does."""
    tool = {"type": "custom", "name": "run", "description": None, "format": {"type": "text"}}
    for said, text in (("<arg_key>cmd</arg_key><arg_value>ls</arg_value>", '{"cmd": "ls"}'), ("", "")):
        server.said = f"</think><tool_call>run{said}</tool_call><|observation|>"
        response = server.response(tools=[tool])
        assert (response["output"][-1]["input"], server.engine.seen[-1].params.grammar) == (text, None)
        assert response["tools"] == [tool]
    server.response(tools=[tool, TOOL], tool_choice={"type": "custom", "name": "run"})
    assert '"add"' not in server.engine.seen[-1].params.grammar and "call_0" in server.engine.seen[-1].params.grammar
    server.said = "</think><tool_call>run<arg_key>input</arg_key><arg_value>half a te"
    response = server.response(tools=[tool])
    assert (response["output"][-1]["input"], response["output"][-1]["status"]) == ("half a te", "incomplete")


def test_an_image_ends_a_turn_and_not_the_conversation(server: Responses) -> None:
    """Refused where the user sends it; where the client keeps it and the conversation goes on, it is told to the model."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "auto"}
    seen = {"role": "user", "content": [{"type": "input_text", "text": "look"}, picture]}
    error = error_of(server.ask(input=[MESSAGE, seen]), 400)
    assert error["param"] == "input[1].content[1].input_image" and "only text parts" in error["message"]
    server.response(input=[MESSAGE, seen, {"role": "user", "content": "never mind"}])
    assert "look[image left out: this model reads text only]" in server.prompt() and "iVBO" not in server.prompt()


def test_more_than_the_context_has_room_for_is_an_upper_bound(server: Responses) -> None:
    server.said = "words that never end"
    response = server.response(max_output_tokens=100_000)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["max_output_tokens"] == 100_000
    server.engine.info, before = structs.replace(server.engine.info, cache_tokens=100), server.engine.info
    try:
        asked = [server.response(max_output_tokens=number) and server.engine.seen[-1] for number in (2, 300)]
    finally:
        server.engine.info = before
    assert [request.params.max_tokens for request in asked] == [2, None]


def test_an_image_in_an_output_is_told_to_the_model(server: Responses) -> None:
    output = [
        {"type": "input_text", "text": "pic.png"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO"},
    ]
    server.response(
        input=[MESSAGE, MADE, {"type": "function_call_output", "call_id": MADE["call_id"], "output": output}]
    )
    assert "pic.png[image left out: this model reads text only]" in server.prompt() and "iVBO" not in server.prompt()


def test_too_long_an_input_is_refused_with_both_numbers(server: Responses) -> None:
    error = error_of(server.ask(input="many words " * 400), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input" and "512" in error["message"]


def test_what_agents_send_is_taken(server: Responses) -> None:
    """Also the objects of clients dumped with all their empty fields."""
    call = {**MADE, "name": "add", "async_": None, "caller": None, "namespace": None}
    response = server.response(
        instructions="You are an agent.", tools=[TOOL], tool_choice="auto", parallel_tool_calls=True, store=False,
        include=["reasoning.encrypted_content"], prompt_cache_key="k", client_metadata={"a": "b"}, service_tier="auto",
        reasoning={"effort": "medium", "summary": "auto"}, text={"verbosity": "medium"},
        stream_options={"include_obfuscation": False},
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "In a sandbox."}]},
            {"type": "message", "role": "user", "content": "go", "id": None, "phase": None},
            {**call, "async": None, "parsed_arguments": {}},
            {"type": "function_call_output", "call_id": "c", "output": "x", "name": "add"},
        ],
    )  # fmt: skip
    assert response["status"] == "completed" and response["prompt_cache_key"] == "k"


def test_the_page_of_the_api_names_every_field(server: Responses) -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "server.md").read_text()
    assert not [name for name in known_fields(ResponsesRequest) if f"`{name}`" not in page]
    assert "/v1/responses`" in page and "/v1/responses" in server.http.get("/openapi.json").json()["paths"]
    assert error_of(server.http.get("/v1/responses/resp_1"), 404)


def test_a_fault_before_the_first_event_is_an_error_event() -> None:
    """Once a stream has sent its headers a fault can have no status; the type is the event's, not the error's."""
    (name, data, *_) = fault_event(ApiError(503, "gone"), "/v1/responses", None).split(b"\n")
    said = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error" and said["type"] == "error" and said["message"] == "gone"
