"""Tools as clients send them: what is accepted in which shape, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from legato.server.tools.arguments import types_of
from legato.server.tools.definitions import Tools
from legato.server.tools.freeform import TextGrammar
from legato.types import ParameterError

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
NESTED = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g", "parameters": None}},
]
FLAT = [
    {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "g", "parameters": None},
]


def test_both_shapes_are_the_same_tools() -> None:
    nested, flat = Tools.from_openai(NESTED), Tools.from_openai(FLAT)
    assert nested == flat and nested is not None
    assert nested.definitions == NESTED
    assert [tool.strict for tool in nested.every] == [True, False]
    assert (nested.choice, nested.allowed, nested.parallel, nested.may_call) == ("auto", {"f", "g"}, True, True)


def test_a_free_form_tool_is_shown_as_a_function_of_one_text() -> None:
    grammar = {"syntax": "regex", "definition": "a+"}
    nested = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": grammar}}}
    flat = {"type": "custom", "name": "f", "description": None, "format": {"type": "grammar", **grammar}}
    tools = Tools.from_openai([nested, NESTED[1]], {"type": "custom", "custom": {"name": "f"}})
    assert tools is not None and tools == Tools.from_openai([flat, NESTED[1]], {"type": "custom", "name": "f"})
    assert (tools.choice, tools.allowed, tools.freeform) == ("required", {"f"}, {"f"})
    (shown, _), (tool, _) = tools.definitions, tools.every
    assert shown == {"type": "function", "function": {"name": "f", "parameters": tool.parameters}}
    assert list(tool.parameters["properties"]) == ["input"] and "a+" in str(shown)
    assert tool.text_grammar == TextGrammar("regex", "a+") and tool.strict
    assert tools.argument_types("f", "input") == {"string"}


@pytest.mark.parametrize(
    ("choice", "expected", "allowed"),
    [
        (None, "auto", "fg"),
        ("auto", "auto", "fg"),
        ("none", "none", ""),
        ("required", "required", "fg"),
        ({"type": "function", "function": {"name": "g"}}, "required", "g"),
        ({"type": "function", "name": "g"}, "required", "g"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NESTED[0]]}}, "auto", "f"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, "required", "g"),
    ],
)
def test_choices(choice: Any, expected: str, allowed: str) -> None:
    tools = Tools.from_openai(NESTED, choice, False)
    assert tools is not None
    assert (tools.choice, tools.allowed, tools.parallel) == (expected, set(allowed), False)
    assert tools.definitions == NESTED, "the prompt does not depend on the choice"
    assert tools.may_call == (expected != "none")


def test_no_tools() -> None:
    for tools in (None, []):
        for choice in (None, "auto", "none"):
            assert Tools.from_openai(tools, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "field"),
    [
        ("f", None, None, "tools"),
        ({"f": 1}, None, None, "tools"),
        (["f"], None, None, "tools[0]"),
        ([NESTED[0], {"type": "web_search"}], None, None, "tools[1].type"),
        ([{"type": "function", "function": "f"}], None, None, "tools[0].function"),
        ([{"type": "function", "function": {}}], None, None, "tools[0].function.name"),
        ([{"type": "function", "name": "two words"}], None, None, "tools[0].name"),
        ([{"type": "function", "name": "</tool_call>"}], None, None, "tools[0].name"),
        ([{"type": "function", "name": "x" * 257}], None, None, "tools[0].name"),
        ([{"type": "function", "name": "f", "description": 5}], None, None, "tools[0].description"),
        ([{"type": "function", "name": "f", "strict": "yes"}], None, None, "tools[0].strict"),
        ([{"type": "function", "name": "f", "parameters": []}], None, None, "tools[0].parameters"),
        ([{"type": "function", "name": "f", "parameters": {"type": "string"}}], None, None, "tools[0].parameters.type"),
        (
            [{"type": "function", "name": "f", "parameters": {"properties": ["a"]}}],
            None,
            None,
            "tools[0].parameters.properties",
        ),
        ([NESTED[0], NESTED[0]], None, None, "tools[1]"),
        (NESTED, "any", None, "tool_choice"),
        (NESTED, 5, None, "tool_choice"),
        (NESTED, {"type": "tool"}, None, "tool_choice.type"),
        (NESTED, {"type": "function", "function": {"name": "h"}}, None, "tool_choice.function.name"),
        (NESTED, {"type": "function"}, None, "tool_choice.name"),
        (NESTED, {"type": "function", "function": "f"}, None, "tool_choice.function"),
        (NESTED, {"type": "allowed_tools", "allowed_tools": 5}, None, "tool_choice.allowed_tools"),
        (NESTED, {"type": "allowed_tools", "mode": "none", "tools": [NESTED[0]]}, None, "tool_choice.mode"),
        (NESTED, {"type": "allowed_tools", "tools": []}, None, "tool_choice.tools"),
        (NESTED, {"type": "allowed_tools", "tools": [{"type": "mcp"}]}, None, "tool_choice.tools[0].type"),
        (NESTED, {"type": "allowed_tools", "tools": [{"name": "h"}]}, None, "tool_choice.tools[0].name"),
        ([{"type": "custom", "name": "f", "parameters": {}}], None, None, "tools[0].parameters"),
        (
            [{"type": "custom", "name": "f", "format": {"type": "grammar", "grammar": {}}}],
            None,
            None,
            "tools[0].format.grammar",
        ),
        ([{"type": "custom", "name": "f"}], {"type": "function", "name": "f"}, None, "tool_choice.name"),
        ([NESTED[0], {"type": "custom", "name": "f"}], None, None, "tools[1]"),
        (NESTED, None, "yes", "parallel_tool_calls"),
        (None, "required", None, "tool_choice"),
        ([], {"type": "function", "function": {"name": "f"}}, None, "tool_choice"),
    ],
)
def test_refusals_name_the_field(tools: Any, choice: Any, parallel: Any, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Tools.from_openai(tools, choice, parallel)
    assert caught.value.name == field and str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "integer null"),
        ({"type": "string", "nullable": True}, "string null"),
        ({"type": "str"}, ""),
        ({}, ""),
        (True, ""),
        ({"enum": ["a", 1, None, 2.5, True]}, "string integer null number boolean"),
        ({"type": "string", "enum": ["a", None]}, "string"),
        ({"const": [1]}, "array"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, "string number"),
        ({"oneOf": [{"type": "string"}, {}]}, ""),
        ({"allOf": [{"$ref": "#/$defs/n"}, {"description": "x"}]}, "number"),
        ({"$ref": "#/$defs/circle"}, ""),
        ({"$ref": "#/$defs/nowhere"}, ""),
        ({"$ref": "https://elsewhere"}, ""),
        ({"$ref": "#/$defs/odd~1name/0"}, "boolean"),
        ({"properties": {}}, "object"),
        ({"items": {}}, "array"),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: str) -> None:
    definitions = {"n": {"type": "number"}, "circle": {"$ref": "#/$defs/circle"}, "odd/name": [{"type": "boolean"}]}
    assert types_of(schema, {"$defs": definitions}) == set(types.split())


def test_schemas_that_fan_out_are_read_once() -> None:
    """2^60 ways through the references, and references in a circle: read in no time."""
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(60)
    }
    definitions["circle"] = {"allOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/circle"}]}
    parameters = {"$defs": definitions, "anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/circle"}]}
    tools = Tools.from_openai([{"type": "function", "name": "f", "parameters": parameters}])
    assert tools is not None and not tools.argument_types("f", "a")
    for name in ("d0", "circle"):
        assert not types_of({"$ref": f"#/$defs/{name}"}, parameters)


def test_arguments_are_found_where_schemas_hide_them() -> None:
    parameters = {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "integer"}}}],
        "$defs": {"base": {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "boolean"}}},
    }
    tools = Tools.from_openai([{"type": "function", "name": "f", "parameters": parameters}])
    assert tools is not None
    assert [tools.argument_types("f", key) for key in "ab"] == [{"string"}, {"integer"}]
    assert tools.argument_types("f", "else") == {"boolean"} and not tools.argument_types("unknown", "a")
