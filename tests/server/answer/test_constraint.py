"""Grammars of tool calls and response formats: what they let through, what they refuse, and real generation under them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from legato.checkpoints import SMALL
from legato.llm import LLM, vocabulary_of
from legato.runtime.grammar import Grammars, allowed_tokens
from legato.server.answer.constraint import answer_format, constrained
from legato.server.answer.events import AnswerMessage
from legato.server.answer.structure import Answer
from legato.server.text.chat_template import ChatTemplate
from legato.server.text.tokenizer import Folder, Tokenizer
from legato.server.tools.definitions import Tools
from legato.types import Grammar, ParameterError, SamplingParams

PLAIN = SamplingParams()
CITY = {"type": "string", "minLength": 2, "maxLength": 8}
WEATHER = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F", None]},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "days", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NESTED = '<arg_key>place</arg_key><arg_value>{"x": 1, "in": {"x": 2}}</arg_value>'
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>"
    f"{NESTED}</tool_call>"
)
NOW = "<tool_call>now</tool_call>"


def tools_of(choice: Any = None, *, strict: bool = False, parallel: bool = True) -> Tools:
    weather = {"name": "weather", "parameters": WEATHER, "strict": strict}
    every = [
        {"type": "function", "function": function}
        for function in (weather, {"name": "now"}, {"name": "any", "parameters": {"type": "object"}})
    ]
    tools = Tools.from_openai(every, choice, parallel)
    assert tools is not None
    return tools


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tokenizer.open(Folder(SMALL))


@pytest.fixture(scope="module")
def grammars(shipped: Tokenizer) -> Grammars:
    return Grammars(vocabulary_of(shipped, 8192))


def fits(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar | None, text: str) -> bool:
    """Whether `text` may be generated, token by token and up to its end."""
    assert grammar is not None
    gate = grammars.gate(grammar)
    for token in tokenizer.encode_template(text):
        if not allowed_tokens(gate.masks([]), 8192)[0, token]:
            return False
        gate.accept([token])
    return bool(allowed_tokens(gate.masks([]), 8192)[0, min(tokenizer.stop_ids)])


def grammar_of(shipped: Tokenizer, tools: Tools | None, response_format: Any = None) -> Grammar | None:
    return constrained(PLAIN, shipped, in_reasoning=False, tools=tools, response_format=response_format).constraint


def test_arguments_of_a_kind_are_one_rule_whatever_they_are_for(shipped: Tokenizer, grammars: Grammars) -> None:
    """Agents bring tools by the hundred: spelled out for each argument their grammar would be larger than may be compiled."""
    point = {
        "type": "object",
        "properties": {"x": {"type": "string"}, "title": {"type": "number"}},
        "required": ["title"],
    }
    kinds: list[Any] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": point},
        {"type": ["null", "string"]},
    ]

    def function(number: int) -> dict[str, Any]:
        properties = {f"a{k}": {**kinds[k % 4], "description": f"{number}, {k}"} for k in range(8)}
        return {"type": "function", "function": {"name": f"f{number}", "parameters": {"properties": properties}}}

    grammar = grammar_of(shipped, Tools.from_openai([function(number) for number in range(40)], "required"))
    assert grammar is not None and grammar.text.count("%json") == 2 and "description" not in grammar.text
    call = "<tool_call>f39<arg_key>a6</arg_key><arg_value>{}</arg_value></tool_call>"
    assert fits(grammars, shipped, grammar, call.format('[{"title": 1}]'))
    assert not fits(grammars, shipped, grammar, call.format('[{"x": "y"}]')), (
        "a property may be called as an annotation is"
    )


APPLY_PATCH = r"""start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF change+
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF"""
"""The kind of grammar that coding agents give their tool for edits."""


@pytest.mark.parametrize("choice", [None, "required"])
@pytest.mark.parametrize(
    ("grammar", "text", "right"),
    [
        (("lark", APPLY_PATCH), "*** Begin Patch\n*** Update File: a}.py\n-x = {\n+\n*** End Patch", True),
        (("lark", APPLY_PATCH), "*** Begin Patch\n*** End Patch", False),
        (("lark", APPLY_PATCH), '{"input": "*** Begin Patch"}', False),
        (("regex", "a/b+"), "a/bb", True),
        (("regex", "a/b+"), "xa/bb", False),
    ],
)
def test_a_free_form_tools_text_follows_its_grammar(
    shipped: Tokenizer, grammars: Grammars, choice: Any, grammar: tuple[str, str], text: str, right: bool
) -> None:
    """In either shape of the tool, the grammar is the same."""
    own = {"syntax": grammar[0], "definition": grammar[1]}
    flat = {"type": "custom", "name": "patch", "format": {"type": "grammar", **own}}
    nested = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": own}}}
    now = {"type": "function", "name": "now"}
    tools = Tools.from_openai([now, flat], choice)
    assert tools is not None and tools == Tools.from_openai([now, nested], choice) and tools.freeform == {"patch"}
    wanted = grammar_of(shipped, tools)
    call = f"<tool_call>patch<arg_key>input</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert fits(grammars, shipped, wanted, call) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (CALL, True),
        (CALL + NOW, True),
        (NOW, True),
        ("<tool_call>any<arg_key>k</arg_key><arg_value>v\n w</arg_value></tool_call>", True),
        (CALL.replace("Bonn", "Bo\nn "), True),
        (CALL.replace("Bonn", "B"), False),
        (CALL.replace("Bonn", "Kaiserslautern"), False),
        (CALL.replace(">3<", ">15<"), False),
        (CALL.replace(">3<", ">three<"), False),
        (CALL.replace(NESTED, ""), False),
        (CALL.replace('"x": 1, ', ""), False),
        (CALL.replace("{", "{ "), False),
        (CALL.replace("weather", "wether"), False),
        (CALL.replace("<arg_key>place", "<arg_key>unit</arg_key><arg_value>null</arg_value><arg_key>place"), True),
        (CALL.replace("<arg_key>place", "<arg_key>unit</arg_key><arg_value>K</arg_value><arg_key>place"), False),
        (CALL.replace("</tool_call>", "<arg_key>note</arg_key><arg_value></arg_value></tool_call>"), True),
        (CALL.replace("</tool_call>", "<arg_key>note</arg_key><arg_value>null or so</arg_value></tool_call>"), True),
        ("<tool_call>now<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>", False),
        ("Well. " + CALL, False),
        ("", False),
    ],
)
def test_required_calls(text: str, right: bool, grammars: Grammars, shipped: Tokenizer) -> None:
    assert fits(grammars, shipped, grammar_of(shipped, tools_of("required")), text) == right


def test_only_strict_promises_the_schema(grammars: Grammars, shipped: Tokenizer) -> None:
    """A required call whose schema has no grammar is made all the same; its other arguments fit."""
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    for odd in ({"type": "object", "not": {}}, deep):
        schema = {"type": "object", "properties": {"odd": odd, "n": {"type": "integer"}}, "required": ["odd", "n"]}
        function = {"name": "f", "parameters": schema}
        with pytest.raises(ParameterError, match=r"tools\[0\].function.parameters.properties.odd: cannot be enforced"):
            grammar_of(shipped, Tools.from_openai([{"type": "function", **function, "strict": True}], "required"))
        grammar = grammar_of(shipped, Tools.from_openai([{"type": "function", **function}], "required"))
        call = (
            "<tool_call>f<arg_key>odd</arg_key><arg_value>{x</arg_value>"
            "<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>"
        )
        assert fits(grammars, shipped, grammar, call) and not fits(grammars, shipped, grammar, call.replace("5", "x"))
        with pytest.raises(ParameterError) as caught:
            answer_format({"type": "json_schema", "schema": odd})
        assert caught.value.name == "response_format.schema"
    free = grammar_of(
        shipped, Tools.from_openai([{"type": "function", "name": "f", "parameters": {"type": "object"}}], "required")
    )
    assert fits(grammars, shipped, free, call)


def test_named_and_single_calls(grammars: Grammars, shipped: Tokenizer) -> None:
    named = grammar_of(shipped, tools_of({"type": "function", "function": {"name": "now"}}))
    assert fits(grammars, shipped, named, NOW) and not fits(grammars, shipped, named, CALL)
    single = grammar_of(shipped, tools_of("required", parallel=False))
    assert fits(grammars, shipped, single, CALL) and not fits(grammars, shipped, single, CALL + NOW)


def test_auto_is_free_unless_something_is_asked(grammars: Grammars, shipped: Tokenizer) -> None:
    assert constrained(PLAIN, shipped, in_reasoning=True, tools=tools_of()) == PLAIN
    loose = "<tool_call>now<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    strict = grammar_of(shipped, tools_of(strict=True))
    for text in ("Hi.", "", f"I ask.\n{CALL}", CALL + loose, f"{CALL} and {NOW}."):
        assert fits(grammars, shipped, strict, text)
    assert not fits(grammars, shipped, strict, CALL.replace(">3<", ">three<"))
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    allowed = grammar_of(shipped, tools_of(some))
    assert fits(grammars, shipped, allowed, f"Hi. {loose}") and not fits(grammars, shipped, allowed, CALL)


def test_none_takes_the_start_of_a_call_away(shipped: Tokenizer) -> None:
    params = constrained(SamplingParams(bad_token_ids=(5,)), shipped, in_reasoning=True, tools=tools_of("none"))
    assert params == SamplingParams(bad_token_ids=(5, shipped.control["<tool_call>"]))


def test_a_response_format_is_for_answers_without_a_call(grammars: Grammars, shipped: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    either = grammar_of(shipped, tools_of(), wanted)
    for text, right in (
        ('{"a": 5}', True),
        (CALL + NOW, True),
        ("Hi.", False),
        ('{"b": 5}', False),
        ('{"a": 5}' + NOW, False),
    ):
        assert fits(grammars, shipped, either, text) == right
    required = grammar_of(shipped, tools_of("required"), wanted)
    assert fits(grammars, shipped, required, CALL) and not fits(grammars, shipped, required, '{"a": 5}')
    none = grammar_of(shipped, tools_of("none"), wanted)
    assert none == answer_format(wanted) and fits(grammars, shipped, none, '{"a":5}')
    regex = grammar_of(shipped, tools_of(), {"type": "regex", "regex": "a/b|[0-9]{3}"})
    for text, right in (("a/b", True), ("123", True), (NOW, True), ("a/", False)):
        assert fits(grammars, shipped, regex, text) == right
    own = constrained(SamplingParams(regex="[0-9]"), shipped, in_reasoning=False, tools=tools_of()).constraint
    assert fits(grammars, shipped, own, "7") and fits(grammars, shipped, own, NOW)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
            Grammar("json_schema", '{"type": "null"}'),
        ),
        ({"type": "json_schema", "name": "n", "schema": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"type": "regex", "regex": "a+"}, Grammar("regex", "a+")),
        ({"type": "grammar", "grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ],
)
def test_response_formats(value: Any, expected: Grammar | None) -> None:
    assert answer_format(value) == expected


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": 5}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "response_format.json_schema.schema"),
        ({"type": "regex", "pattern": "a"}, "response_format.regex"),
        ({"type": "grammar", "grammar": 5}, "response_format.grammar"),
    ],
)
def test_bad_response_formats_name_the_field(value: Any, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        answer_format(value)
    assert caught.value.name == field


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "object", "properties": {"a": {"type": "object", "not": {}}}}, "properties.a"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "properties.a"),
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}}, "properties.a"),
        ({"type": "object"}, ""),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": "1}/"}}}, ""),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": 5}}}, ""),
        (
            {"type": "object", "properties": {"a": {"allOf": [{"type": "string", "maxLength": 1}, {"maxLength": 2}]}}},
            "",
        ),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_by_name(parameters: Any, field: str, shipped: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(ParameterError) as caught:
        constrained(
            PLAIN, shipped, in_reasoning=False, tools=Tools.from_openai([{"type": "function", "name": "g"}, tool])
        )
    assert caught.value.name == ".".join(["tools[1].function.parameters", *([field] if field else [])])


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^[a-c]+$", ["a", "abc"], ["", "abd", "x a"]),
        ("[0-9]", ["5", "a5b", "a\n5"], ["", "ab"]),
        ("^a", ["a", "abc"], ["ba"]),
        ("b$", ["b", "ab"], ["ba"]),
        ("^a|b$", ["ax", "xb"], ["xx"]),
        ("^(a|b)$", ["a", "b"], ["ab"]),
        ("a/b", ["xa/bx"], ["ab"]),
        (r"^a\/b$", ["a/b"], ["a\\/b"]),
        (r"^a\\/b$", ["a\\/b"], ["a/b"]),
        ("^a\\\nb$", ["a\nb"], ["ab", "a\\\nb"]),
        (r"^\d\$$", ["5$"], ["5"]),
        (r"^x\|[|y)]$|^(a|b)c$", ["x||", "x|)", "bc"], ["x|", "a"]),
    ],
)
def test_patterns_of_text_arguments(
    pattern: str, right: list[str], wrong: list[str], grammars: Grammars, shipped: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    tools = Tools.from_openai([{"type": "function", "name": "f", "parameters": schema}], "required")
    grammar = grammar_of(shipped, tools)
    for text in (*right, *wrong):
        call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert fits(grammars, shipped, grammar, call) == (text in right), text


@pytest.mark.parametrize(
    ("regex", "right", "wrong"),
    [
        (r"\d{2}\/\d{2}", ["12/34"], ["12\\/34", "1234"]),
        (r"\d{2}/\d{2}", ["12/34"], ["12\\/34"]),
        (r"\w\\/\w", ["a\\/b"], ["a/b"]),
        (r"\w\\\/\w", ["a\\/b"], ["a/b"]),
        (r"x[/]y[^/\\]z[\\/]", ["x/y-z/", "x/y-z\\"], ["x/y/z/"]),
        ("a\nb", ["a\nb"], ["ab"]),
        ("a\\\nb", ["a\nb"], ["ab", "a\\\nb"]),
        (r"a\nb", ["a\nb"], ["ab"]),
        (r"a\\\\nb", ["a\\\\nb"], ["a\nb"]),
        ("a[\n/]b", ["a\nb", "a/b"], ["ab"]),
        ("//", ["//"], ["/"]),
        ("", [""], ["a"]),
    ],
)
def test_a_regex_means_the_same_beside_tools(
    regex: str, right: list[str], wrong: list[str], grammars: Grammars, shipped: Tokenizer
) -> None:
    for tools in (None, tools_of()):
        grammar = grammar_of(shipped, tools, {"type": "regex", "regex": regex})
        for text in (*right, *wrong):
            assert fits(grammars, shipped, grammar, text) == (text in right), (tools, text)
    assert fits(grammars, shipped, grammar, CALL)


def test_a_regex_beside_tools_cannot_end_in_a_lone_backslash(shipped: Tokenizer) -> None:
    with pytest.raises(ParameterError, match="regex: a regular expression cannot end in a single backslash"):
        grammar_of(shipped, tools_of(), {"type": "regex", "regex": "a\\"})


def test_names_and_keys_of_any_spelling(grammars: Grammars, shipped: Tokenizer) -> None:
    key, choice = 'a "b" \\ ü\t', "x\ny/"
    schema = {"type": "object", "properties": {key: {"enum": [choice, "😀"]}}, "required": [key]}
    tools = Tools.from_openai([{"type": "function", "name": "mcp__a.b:c/ü", "parameters": schema}], "required")
    for value in (choice, "😀"):
        call = f"<tool_call>mcp__a.b:c/ü<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert fits(grammars, shipped, grammar_of(shipped, tools), call)


def test_what_cannot_be_combined(shipped: Tokenizer, description: dict[str, Any]) -> None:
    wanted = {"type": "json_object"}
    with pytest.raises(ParameterError, match="response_format: cannot be combined with regex"):
        constrained(SamplingParams(regex="a"), shipped, in_reasoning=False, response_format=wanted)
    with pytest.raises(ParameterError, match="grammar: cannot be combined with tools"):
        constrained(SamplingParams(grammar='start: "a"'), shipped, in_reasoning=False, tools=tools_of())
    endless = SamplingParams(ignore_eos=True)
    for asked, tools, form in (
        ("response_format", None, wanted),
        ("response_format", tools_of(), wanted),
        ("tool_choice", tools_of("required"), wanted),
        ("strict or allowed tools", tools_of(strict=True), None),
    ):
        with pytest.raises(ParameterError, match=f"ignore_eos: cannot be combined with {asked}"):
            constrained(endless, shipped, in_reasoning=False, tools=tools, response_format=form)
    assert constrained(endless, shipped, in_reasoning=False, tools=tools_of()) == endless
    bare = Tokenizer({**description, "added_tokens": []})
    with pytest.raises(ParameterError, match="tool_choice: needs a tokenizer with the token <tool_call>"):
        constrained(PLAIN, bare, in_reasoning=False, tools=tools_of("required"))
    for params in (SamplingParams(regex="a"), SamplingParams(reasoning_budget=3)):
        with pytest.raises(ParameterError, match="needs a tokenizer with the token </think>"):
            constrained(params, bare, in_reasoning=True)
    assert constrained(PLAIN, bare, in_reasoning=False, tools=tools_of("none")) == PLAIN


# -- real generation -----------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "How is the weather in Bonn?"}]


@pytest.fixture(scope="module")
def llms() -> list[LLM]:
    return [LLM(num_drafts=0), LLM(num_drafts=5)]


def answered(
    llms: list[LLM], params: SamplingParams, tools: Tools | None, response_format: Any, **arguments: Any
) -> AnswerMessage:
    """The answer of the shipped checkpoint: the same tokens from every engine, without drafts or with them."""
    prompt = llms[0].render(QUESTION, None if tools is None else tools.definitions, **arguments)
    params = constrained(
        params, llms[0].tokenizer, in_reasoning=prompt.in_reasoning, tools=tools, response_format=response_format
    )
    tokens = [llm.generate(prompt.ids, params)[0].token_ids for llm in llms]
    assert tokens[0] == tokens[-1]
    answer = Answer(llms[0].tokenizer, in_reasoning=prompt.in_reasoning, tools=tools)
    answer.push(tokens[0])
    answer.finish("stop")
    return answer.message


def test_a_required_call_is_made(llms: list[LLM]) -> None:
    tools = tools_of({"type": "function", "function": {"name": "weather"}}, parallel=False)
    message = answered(llms, SamplingParams(seed=5, max_tokens=160, reasoning_budget=6), tools, None)
    assert message.reasoning and not message.content
    (call,) = message.calls
    given = json.loads(call.arguments)
    assert call.name == "weather" and call.is_complete
    assert 2 <= len(given["city"]) <= 8 and 1 <= given["days"] <= 14 and isinstance(given["place"]["x"], int)


def test_a_regex_with_slashes_is_generated_beside_tools(llms: list[LLM]) -> None:
    wanted = {"type": "regex", "regex": r"\d{2}\/\d{2}[/\\]"}
    bias = {llms[0].tokenizer.control["<tool_call>"]: -100.0}
    params = SamplingParams(seed=3, max_tokens=12, logit_bias=bias)
    message = answered(llms, params, tools_of(), wanted, enable_thinking=False)
    assert re.fullmatch(wanted["regex"], message.content) and not message.calls


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}], ids=["thinking", "no thinking"])
def test_a_response_format_holds_for_the_content_alone(arguments: dict[str, Any], llms: list[LLM]) -> None:
    wanted = {"type": "regex", "regex": "(yes|no), [0-9]{2} degrees"}
    params = SamplingParams(seed=3, max_tokens=40, reasoning_budget=5)
    message = answered(llms, params, None, wanted, **arguments)
    assert re.fullmatch(wanted["regex"], message.content) and bool(message.reasoning) == (not arguments)


def test_a_forced_call_is_not_made_inside_reasoning(llms: list[LLM]) -> None:
    """Where the model would rather call at once, it still has to end its reasoning first."""
    tools = tools_of("required", parallel=False)
    bias = {llms[0].tokenizer.control["<tool_call>"]: 80.0}
    message = answered(
        llms[1:], SamplingParams(seed=5, max_tokens=160, reasoning_budget=4, logit_bias=bias), tools, None
    )
    assert len(message.calls) == 1 and message.calls[0].is_complete and message.reasoning


def test_with_choice_none_there_is_no_call(llms: list[LLM]) -> None:
    bias = {llms[0].tokenizer.control["<tool_call>"]: 80.0}
    params = SamplingParams(seed=5, max_tokens=8, logit_bias=bias)
    free = answered(llms[1:], params, tools_of("auto"), None, enable_thinking=False)
    assert "<tool_call>" in free.content
    message = answered(llms[1:], params, tools_of("none"), None, enable_thinking=False)
    assert not message.calls and "<tool_call>" not in message.content


def test_prompts_do_not_depend_on_the_choice(shipped: Tokenizer) -> None:
    template = ChatTemplate.open(Folder(SMALL), shipped)
    prompts = {template.render(QUESTION, tools_of(choice).definitions).ids for choice in ("auto", "none", "required")}
    assert len(prompts) == 1
