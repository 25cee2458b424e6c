"""Free-form (`custom`) tools in /v1/chat/completions, with a scripted engine: calls, streams, choices, history, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.scripted import HI, TOOL, Server, error_of

GRAMMAR: dict[str, Any] = {
    "syntax": "lark",
    "definition": 'start: "*** Begin" LF /.+/ LF "*** End"\n%import common.LF',
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Edits files.", "format": {"type": "grammar", "grammar": GRAMMAR}},
}
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}}
EDIT = '*** Begin\n+ say("ü \\\\ \\n 🎹 </x>")\t\n*** End'
ADD = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
END = "<|observation|>"


def written(text: str, name: str = "patch") -> str:
    return f"<tool_call>{name}<arg_key>input</arg_key><arg_value>{text}</arg_value></tool_call>"


def prompt_of(server: Server, number: int = -1) -> str:
    return server.text.tokenizer.decode(server.engine.seen[number].prompt)


def calls_of(server: Server, **fields: Any) -> list[dict[str, Any]]:
    reply = server.chat(**fields)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["message"]["tool_calls"]


def call_deltas(chunks: list[Any], choice: int = 0) -> list[dict[str, Any]]:
    """All that a stream says of calls, in order; each piece comes in a delta of its own."""
    found: list[dict[str, Any]] = []
    for chunk in chunks:
        for each in chunk["choices"]:
            if each["index"] == choice and "tool_calls" in each["delta"]:
                (delta,) = each["delta"]["tool_calls"]
                found.append(delta)
    return found


def input_of(deltas: list[dict[str, Any]], index: int) -> str:
    """The text of a call, put together as clients do; checks the form of its deltas on the way."""
    first, *others = (delta for delta in deltas if delta["index"] == index)
    assert first == {**first, "type": "custom", "custom": {**first["custom"], "input": ""}} and len(first) == 4
    assert all(delta == {"index": index, "custom": {"input": delta["custom"]["input"]}} for delta in others)
    assert all(delta["custom"]["input"] for delta in others), "nothing is said twice, and nothing for nothing"
    return "".join(delta["custom"]["input"] for delta in others)


@pytest.mark.parametrize("width", [1, 2, 3, 100])
def test_a_call_is_its_text(server: Server, width: int) -> None:
    """Beside a function's, whole and streamed: quotes, backslashes, tabs and all."""
    server.said, server.width = f"</think>Editing.{ADD}{written(EDIT)}{END}", width
    try:
        whole = server.chat(tools=[TOOL, PATCH]).json()["choices"][0]
        chunks = server.chunks(tools=[TOOL, PATCH])
    finally:
        server.width = 3
    function, custom = whole["message"]["tool_calls"]
    assert function == {"id": function["id"], "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert custom == {"id": custom["id"], "type": "custom", "custom": {"name": "patch", "input": EDIT}}
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "Editing.")
    deltas = call_deltas(chunks)
    assert [(delta["index"], delta["type"]) for delta in deltas if "id" in delta] == [(0, "function"), (1, "custom")]
    assert "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == 0) == '{"a": 1}'
    assert input_of(deltas, 1) == EDIT and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_text_is_streamed_as_it_comes(server: Server) -> None:
    """One token a step: the text comes in nearly as many pieces as it has tokens, each in a chunk of its own, with its tokens."""
    server.said, server.width = f"</think>{written(EDIT)}{END}", 1
    try:
        chunks = server.chunks(tools=[PATCH], return_token_ids=True, logprobs=True)
    finally:
        server.width = 3
    num_tokens = len(server.text.tokenizer.encode_template(EDIT))
    assert num_tokens / 2 < len(call_deltas(chunks)) - 1 <= num_tokens
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == server.text.tokenizer.encode_template(server.said)
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == len(ids)


def test_every_choice_has_its_own_calls(server: Server) -> None:
    server.said = f"</think>{written(EDIT)}{written('ls', 'run')}{END}"
    chunks = server.chunks(tools=[PATCH, RUN], n=3)
    for choice in range(3):
        deltas = call_deltas(chunks, choice)
        assert [input_of(deltas, index) for index in (0, 1)] == [EDIT, "ls"]
    assert len({delta["id"] for choice in range(3) for delta in call_deltas(chunks, choice) if "id" in delta}) == 6


def test_a_model_is_asked_as_in_responses(server: Server) -> None:
    """The same prompt and the same grammar; and `/tokenize` sees that prompt."""
    form = {"type": "grammar", **GRAMMAR}
    flat = {"type": "custom", "name": "patch", "description": "Edits files.", "format": form}
    function: Any = TOOL["function"]
    add = {"type": "function", **function}
    for choice in ("auto", "required"):
        server.chat(tools=[PATCH, TOOL], tool_choice=choice)
        body = {"input": "hi", "tools": [flat, add], "tool_choice": choice}
        assert server.http.post("/v1/responses", json=body).status_code == 200
        ours, theirs = server.engine.seen[-2:]
        assert ours.prompt == theirs.prompt and ours.params.grammar == theirs.params.grammar
        assert "%import common.LF" in prompt_of(server) and "Begin" in str(ours.params.grammar)
    tokenized = server.http.post("/tokenize", json={"messages": HI, "tools": [PATCH, TOOL]}).json()
    assert tuple(tokenized["tokens"]) == server.engine.seen[-1].prompt


def test_a_tool_without_a_grammar_takes_any_text(server: Server) -> None:
    """What a model writes instead of the one text is the text; a text that is cut ends early."""
    whole = ("<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>", "</tool_call>")
    cut = ("<arg_key>input</arg_key><arg_value>half a te", "<arg_key>inp")
    for said, text in zip((*whole, *cut), ('{"cmd": "ls"}', "", "half a te", "")):
        server.said = f"</think><tool_call>run{said}" + (END if said in whole else "")
        for tool in (RUN, {**RUN, "custom": {"name": "run", "description": None, "format": None}}):
            assert calls_of(server, tools=[tool])[0]["custom"] == {"name": "run", "input": text}
            assert input_of(call_deltas(server.chunks(tools=[tool])), 0) == text
            assert server.engine.seen[-1].params.grammar is None


CUSTOM_CHOICE = {"type": "custom", "custom": {"name": "patch"}}
BOTH = [CUSTOM_CHOICE, {"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("required", {0, 1, 2}),
        (CUSTOM_CHOICE, {1}),
        ({"type": "function", "function": {"name": "add"}}, {0}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": BOTH}}, {0, 1}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": BOTH[:1]}}, {1}),
    ],
)
def test_a_choice_points_to_a_tool_of_either_kind(server: Server, choice: Any, called: set[int]) -> None:
    assert server.chat(tools=[TOOL, PATCH, RUN], tool_choice=choice).status_code == 200
    grammar = server.engine.seen[-1].params.grammar
    assert grammar is not None and {number for number in range(3) if f"call_{number}:" in grammar} == called


def test_no_call_and_one_call(server: Server) -> None:
    server.said = f"</think>{written(EDIT)}{written(EDIT)}{END}"
    assert len(calls_of(server, tools=[PATCH])) == 2
    assert len(calls_of(server, tools=[PATCH], parallel_tool_calls=False)) == 1
    message = server.chat(tools=[PATCH], tool_choice="none").json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert server.text.tokenizer.control["<tool_call>"] in server.engine.seen[-1].params.bad_token_ids


def test_calls_come_back_in_the_conversation(server: Server) -> None:
    """As they were told, or dumped with empty fields: the model sees what it had written, and results in the calls' order."""
    server.said = f"</think>{written(EDIT)}{written('ls', 'run')}{END}"
    (patch, run), tools = calls_of(server, tools=[PATCH, RUN]), [PATCH, RUN]
    results = [
        {"role": "tool", "tool_call_id": run["id"], "content": "of run"},
        {"role": "tool", "tool_call_id": patch["id"], "content": [{"type": "text", "text": "of patch"}]},
    ]
    dumped = {**run, "function": None, "index": 1}
    for second in (run, dumped):
        turn = {"role": "assistant", "content": None, "tool_calls": [patch, second]}
        assert server.chat(messages=[*HI, turn, *results], tools=tools).status_code == 200
        prompt = prompt_of(server)
        assert f"{written(EDIT)}{written('ls', 'run')}" in prompt and "🎹" in prompt
        assert prompt.index("<tool_response>of patch") < prompt.index("<tool_response>of run")
    functions = [
        {"id": call["id"], "type": "function",
         "function": {"name": call["custom"]["name"], "arguments": json.dumps({"input": call["custom"]["input"]})}}
        for call in (patch, run)
    ]  # fmt: skip
    turn = {"role": "assistant", "content": None, "tool_calls": functions}
    assert server.chat(messages=[*HI, turn, *results], tools=tools).status_code == 200
    assert server.engine.seen[-1].prompt == server.engine.seen[-2].prompt


def custom(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL, {"type": "custom", "custom": {"name": "f", **fields}}]}


def grammar(**fields: Any) -> dict[str, Any]:
    return custom(format={"type": "grammar", "grammar": {**GRAMMAR, **fields}})


def history(**fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}, **fields}
    return {
        "messages": [*HI, {"role": "assistant", "tool_calls": [{**call, "custom": {"name": "f", "input": ""}}, call]}]
    }


FORMAT = "tools[1].custom.format"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "without spaces"),
        ({"tools": [{"type": "custom", "custom": "f"}]}, "tools[0].custom", "object"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", "without spaces"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}, "name": "f"}]}, "tools[0].function", "a custom tool has"),
        ({"tools": [{**RUN, "strict": True}]}, "tools[0].strict", "not supported"),
        ({"tools": [TOOL, {"type": "browser"}]}, "tools[1].type", "browser"),
        (custom(name="two words"), "tools[1].custom.name", "two words"),
        (custom(name="add"), "tools[1]", "a second tool"),
        (custom(description=3), "tools[1].custom.description", "text"),
        (custom(parameters={}), "tools[1].custom.parameters", "a custom tool has name, description, format"),
        (custom(format="text"), FORMAT, "object"),
        (custom(format={}), f"{FORMAT}.type", "'text' or 'grammar'"),
        (custom(format={"type": "json"}), f"{FORMAT}.type", "json"),
        (custom(format={"type": "text", "grammar": GRAMMAR}), f"{FORMAT}.grammar", "has type"),
        (custom(format={"type": "grammar"}), f"{FORMAT}.grammar", "object"),
        (custom(format={"type": "grammar", **GRAMMAR}), f"{FORMAT}.syntax", "has type, grammar"),
        (grammar(flags="i"), f"{FORMAT}.grammar.flags", "has syntax, definition"),
        (grammar(syntax="ebnf"), f"{FORMAT}.grammar.syntax", "ebnf"),
        (grammar(definition=""), f"{FORMAT}.grammar.definition", "text"),
        (grammar(definition="start: nothing"), f"{FORMAT}.grammar.definition", "cannot be enforced"),
        (grammar(syntax="regex", definition="("), f"{FORMAT}.grammar.definition", "cannot be enforced"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice.custom.name", "patch"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "add"}}}, "tool_choice.custom.name", "none"),
        ({"tools": [PATCH], "tool_choice": {"type": "function", "function": {"name": "patch"}}},
         "tool_choice.function.name", "function tools"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom"}}, "tool_choice.name", "patch"),
        ({"tools": [PATCH], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{**RUN}]}}},
         "tool_choice.allowed_tools.tools[0].custom.name", "run"),
        ({"tool_choice": CUSTOM_CHOICE}, "tool_choice", "needs tools"),
        (history(custom=None), "messages[1].tool_calls[1].custom", "object"),
        (history(custom={"input": "x"}), "messages[1].tool_calls[1].custom.name", "text"),
        (history(custom={"name": "f", "input": {"a": 1}}), "messages[1].tool_calls[1].custom.input", "text, got dict"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str, told: str) -> None:
    error = error_of(server.chat(**fields), 400)
    assert error["param"] == param and told in error["message"], error
    assert not server.engine.seen


def test_the_document_of_the_api_shows_both_kinds(server: Server) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    asked, told = json.dumps(schemas["ChatRequest"]["properties"]["tools"]), json.dumps(schemas["ChatMessageReply"])
    assert all(f'"const": "{kind}"' in asked for kind in ("function", "custom")) and '"lark"' in asked
    assert "CustomCallReply" in told and set(schemas["CustomReply"]["properties"]) == {"name", "input"}
