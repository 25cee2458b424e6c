"""The tools of a request and which of them the model may or must call: checked once, with errors that name the field.

Owns the OpenAI shapes of `tools` (functions and free-form, `custom`, ones), `tool_choice` and `parallel_tool_calls`: nested as in
chat completions, flat as in responses. Knows nothing of tokens. The HTTP dialects make a `Tools`; `server.answer.structure` types
arguments by it, `server.answer.constraint` makes its grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from legato.server.tools.arguments import UNKNOWN, Types, argument_types
from legato.server.tools.freeform import TextGrammar, parameters
from legato.types import ParameterError

Choice = Literal["none", "auto", "required"]
Kind = Literal["function", "custom"]
NAME = re.compile(r"[^\s<>{}\"]{1,256}")
"""A tool's name: anything that cannot be taken for a part of the call's own notation."""
CUSTOM_FIELDS = ("name", "description", "format")
"""What a free-form tool has."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments; `definition`: what the template shows.

    `strict`: its arguments must fit the schema, whatever the choice of tools. `kind`: a `custom` tool is free-form, shown as a
    function of one text. `text_grammar`: what that text must follow; such a tool is strict."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    definition: Mapping[str, Any]
    kind: Kind = "function"
    text_grammar: TextGrammar | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """All tools of a request, those of them that may be called, and whether one must be.

    Attributes:
        every: the tools in the order given; the prompt shows all of them.
        choice: `none`: no call; `auto`: the model decides; `required`: at least one call.
        allowed: names of the tools that may be called.
        parallel: several calls in one turn are welcome; otherwise the turn ends with the first.
    """

    every: tuple[Tool, ...]
    choice: Choice
    allowed: frozenset[str]
    parallel: bool = True

    @classmethod
    def from_openai(cls, tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> Tools | None:
        """Checks what a client sent; `None` when there are no tools.

        Raises:
            ParameterError: a field is wrong or not supported; its name is the path of the field (`tools[2].function.name`).
        """
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise ParameterError("parallel_tool_calls", f"must be true or false, got {parallel_tool_calls!r}")
        if tools is None or tools == []:
            if tool_choice not in (None, "none", "auto"):
                raise ParameterError("tool_choice", f"needs tools, and there are none, got {_short(tool_choice)}")
            return None
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise ParameterError("tools", f"must be a list of tools, got {type(tools).__name__}")
        every = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(cast(Sequence[Any], tools)))
        names = [tool.name for tool in every]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ParameterError(f"tools[{number}]", f"a second tool with the name {name!r}")
        choice, allowed = _choice(tool_choice, every)
        return cls(every, choice, allowed, parallel_tool_calls is not False)

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """For the chat template: all tools, whatever may be called, so that the choice does not change the prompt."""
        return [tool.definition for tool in self.every]

    @property
    def freeform(self) -> frozenset[str]:
        """Names of the tools whose calls are a text."""
        return frozenset(tool.name for tool in self.every if tool.kind == "custom")

    @property
    def may_call(self) -> bool:
        """Whether any call is possible."""
        return self.choice != "none"

    def argument_types(self, name: str, key: str) -> Types:
        """The JSON types of an argument; `UNKNOWN` for a tool or an argument that is not declared."""
        for tool in self.every:
            if tool.name == name:
                return argument_types(tool.parameters, key)
        return UNKNOWN


def custom_schema(title: str, *, is_nested: bool) -> dict[str, Any]:
    """The JSON schema of a free-form tool, for an API's description of itself. `is_nested`: fields and grammar are objects of
    their own, as in chat completions."""

    def having(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": [*required]}

    inside = {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string"}}
    grammar = {"grammar": having(inside, *inside)} if is_nested else inside
    forms = [
        having({"type": {"const": "text"}}, "type"),
        having({"type": {"const": "grammar"}, **grammar}, "type", *grammar),
        {"type": "null"},
    ]
    fields = {
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "format": {"anyOf": forms, "description": "What its input looks like; a grammar is enforced."},
    }
    kind = {"type": {"const": "custom"}}
    if is_nested:
        return {"title": title, **having({**kind, "custom": having(fields, "name")}, "type", "custom")}
    return {"title": title, **having({**kind, **fields}, "type", "name")}


def refuse_others(fields: Mapping[str, Any], known: Sequence[str], where: str, what: str) -> None:
    """Refuses the first field that is none of the `known` ones of `what`, unless it says nothing. Raises `ParameterError`."""
    for name, value in fields.items():
        if name not in known and value is not None:
            raise ParameterError(f"{where}.{name[:64]}", f"is not supported; {what} has {', '.join(known)}")


def _tool(tool: Any, where: str) -> Tool:
    fields = _object(tool, where)
    kind = fields.get("type", "function")
    if kind not in ("function", "custom"):
        raise ParameterError(f"{where}.type", f"only function and custom tools are supported, got {_short(kind)}")
    is_nested = kind in fields
    path = f"{where}.{kind}" if is_nested else where
    inner = _object(fields[kind], path) if is_nested else {key: fields[key] for key in fields if key != "type"}
    name = inner.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ParameterError(
            f"{path}.name", f'must be 1 to 256 characters without spaces and without any of <>{{}}", got {_short(name)}'
        )
    if not isinstance(inner.get("description"), str | None):
        raise ParameterError(f"{path}.description", f"must be text, got {_short(inner['description'])}")
    if kind == "function":
        return _function(name, inner, path)
    if is_nested:
        refuse_others(fields, ("type", "custom"), where, "a custom tool")
    return _custom(name, inner, path, is_nested=is_nested)


def _function(name: str, function: Mapping[str, Any], path: str) -> Tool:
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise ParameterError(f"{path}.strict", f"must be true or false, got {_short(strict)}")
    schema = {} if function.get("parameters") is None else _object(function["parameters"], f"{path}.parameters")
    if schema.get("type", "object") != "object":
        raise ParameterError(f"{path}.parameters.type", f"must be 'object', got {_short(schema['type'])}")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise ParameterError(f"{path}.parameters.properties", f"must be an object, got {_short(schema['properties'])}")
    return Tool(name, schema, strict is True, {"type": "function", "function": function})


def _custom(name: str, custom: Mapping[str, Any], path: str, *, is_nested: bool) -> Tool:
    refuse_others(custom, CUSTOM_FIELDS, path, "a custom tool")
    grammar = _grammar(custom.get("format"), f"{path}.format", is_nested=is_nested)
    shown = {key: custom[key] for key in ("name", "description") if custom.get(key) is not None}
    schema = parameters(grammar)
    definition = {"type": "function", "function": {**shown, "parameters": schema}}
    return Tool(name, schema, grammar is not None, definition, "custom", grammar)


def _grammar(form: Any, path: str, *, is_nested: bool) -> TextGrammar | None:
    """What the text of a free-form tool must follow. `is_nested`: the grammar is an object of its own, as the tool is."""
    fields = {"type": "text"} if form is None else _object(form, path)
    kind = fields.get("type")
    if kind not in ("text", "grammar"):
        raise ParameterError(f"{path}.type", f"must be 'text' or 'grammar', got {_short(kind)}")
    inside = ("syntax", "definition")
    known = ("type",) if kind == "text" else ("type", "grammar") if is_nested else ("type", *inside)
    refuse_others(fields, known, path, f"a format of type {kind!r}")
    if kind == "text":
        return None
    if is_nested:
        path = f"{path}.grammar"
        fields = _object(fields.get("grammar"), path)
        refuse_others(fields, inside, path, "a grammar")
    syntax, definition = (fields.get(name) for name in inside)
    if syntax not in ("lark", "regex"):
        raise ParameterError(f"{path}.syntax", f"must be 'lark' or 'regex', got {_short(syntax)}")
    if not isinstance(definition, str) or not definition:
        raise ParameterError(f"{path}.definition", f"must be text, got {_short(definition)}")
    return TextGrammar(syntax, definition)


def _choice(tool_choice: Any, tools: Sequence[Tool]) -> tuple[Choice, frozenset[str]]:
    """The choice and the names that may be called."""
    everything = frozenset(tool.name for tool in tools)
    if tool_choice is None:
        return "auto", everything
    if tool_choice == "none":
        return "none", frozenset()
    if tool_choice in ("auto", "required"):
        return cast(Choice, tool_choice), everything
    if not isinstance(tool_choice, Mapping):
        raise ParameterError(
            "tool_choice", f"must be 'none', 'auto', 'required' or an object, got {_short(tool_choice)}"
        )
    fields = cast(Mapping[str, Any], tool_choice)
    kind = fields.get("type")
    if kind in ("function", "custom"):
        return "required", frozenset({_reference(fields, "tool_choice", tools)})
    if kind == "allowed_tools":
        path = "tool_choice.allowed_tools" if "allowed_tools" in fields else "tool_choice"
        inner = _object(fields.get("allowed_tools", fields), path)
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required"):
            raise ParameterError(f"{path}.mode", f"must be 'auto' or 'required', got {_short(mode)}")
        if not isinstance(listed, list) or not listed:
            raise ParameterError(f"{path}.tools", f"must be a list of at least one tool, got {_short(listed)}")
        references = enumerate(cast(list[Any], listed))
        return mode, frozenset(_reference(entry, f"{path}.tools[{n}]", tools) for n, entry in references)
    raise ParameterError("tool_choice.type", f"must be 'function', 'custom' or 'allowed_tools', got {_short(kind)}")


def _reference(value: Any, where: str, tools: Sequence[Tool]) -> str:
    """The name of a tool that is pointed to, as `{"type": "function", "function": {"name": ...}}` or `{"name": ...}`; a type, if
    given, must be the tool's."""
    fields = _object(value, where)
    kind = fields.get("type")
    if kind not in (None, "function", "custom"):
        raise ParameterError(f"{where}.type", f"only function and custom tools are supported, got {_short(kind)}")
    key = kind or "function"
    path = f"{where}.{key}" if key in fields else where
    name = _object(fields.get(key, fields), path).get("name")
    names = [tool.name for tool in tools if kind in (None, tool.kind)]
    if name not in names:
        what, known = f"{kind} tools" if kind else "tools", ", ".join(names[:8]) or "there are none"
        raise ParameterError(f"{path}.name", f"is none of the {what} ({known}), got {_short(name)}")
    return cast(str, name)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(where, f"must be an object, got {_short(value)}")
    return dict(cast(Mapping[str, Any], value))


def _short(value: object) -> str:
    """A value for a message: never a wall of text."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"
