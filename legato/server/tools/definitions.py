"""The tools of a request and which of them the model may or must call: checked once, with errors that name the field.

Owns the OpenAI shapes of `tools`, `tool_choice` and `parallel_tool_calls` (nested as in chat completions, flat as in responses).
Knows nothing of tokens. The HTTP dialects make a `Tools`; `server.answer.structure` types arguments by it,
`server.answer.constraint` makes its grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from legato.server.tools.arguments import UNKNOWN, Types, argument_types
from legato.server.tools.freeform import TextGrammar
from legato.types import ParameterError

Choice = Literal["none", "auto", "required"]
NAME = re.compile(r"[^\s<>{}\"]{1,256}")
"""A function's name: anything that cannot be taken for a part of the call's own notation."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments; `definition`: what the template shows.

    `strict`: its arguments must fit the schema, whatever the choice of tools. `text_grammar`: what the text of a free-form tool,
    its only argument, must follow; such a tool is strict."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    definition: Mapping[str, Any]
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
                raise ParameterError(f"tools[{number}]", f"a second function with the name {name!r}")
        choice, allowed = _choice(tool_choice, names)
        return cls(every, choice, allowed, parallel_tool_calls is not False)

    def following(self, grammars: Mapping[str, TextGrammar | None]) -> Tools:
        """The same tools, of which those named are held to the grammars of their texts."""
        every = (
            tool if (grammar := grammars.get(tool.name)) is None else replace(tool, text_grammar=grammar, strict=True)
            for tool in self.every
        )
        return replace(self, every=tuple(every))

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """For the chat template: all tools, whatever may be called, so that the choice does not change the prompt."""
        return [tool.definition for tool in self.every]

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


def _tool(tool: Any, where: str) -> Tool:
    fields = _object(tool, where)
    kind = fields.get("type", "function")
    if kind != "function":
        raise ParameterError(f"{where}.type", f"only function tools are supported, got {_short(kind)}")
    is_nested = "function" in fields
    path = f"{where}.function" if is_nested else where
    function = _object(fields["function"], path) if is_nested else dict(fields)
    function.pop("type", None) if not is_nested else None
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ParameterError(
            f"{path}.name", f'must be 1 to 256 characters without spaces and without any of <>{{}}", got {_short(name)}'
        )
    if not isinstance(function.get("description"), str | None):
        raise ParameterError(f"{path}.description", f"must be text, got {_short(function['description'])}")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise ParameterError(f"{path}.strict", f"must be true or false, got {_short(strict)}")
    parameters = {} if function.get("parameters") is None else _object(function["parameters"], f"{path}.parameters")
    if parameters.get("type", "object") != "object":
        raise ParameterError(f"{path}.parameters.type", f"must be 'object', got {_short(parameters['type'])}")
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise ParameterError(
            f"{path}.parameters.properties", f"must be an object, got {_short(parameters['properties'])}"
        )
    return Tool(name, parameters, strict is True, {"type": "function", "function": function})


def _choice(tool_choice: Any, names: Sequence[str]) -> tuple[Choice, frozenset[str]]:
    """The choice and the names that may be called."""
    everything = frozenset(names)
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
    if kind == "function":
        return "required", frozenset({_reference(fields, "tool_choice", names)})
    if kind == "allowed_tools":
        path = "tool_choice.allowed_tools" if "allowed_tools" in fields else "tool_choice"
        inner = _object(fields.get("allowed_tools", fields), path)
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required"):
            raise ParameterError(f"{path}.mode", f"must be 'auto' or 'required', got {_short(mode)}")
        if not isinstance(listed, list) or not listed:
            raise ParameterError(f"{path}.tools", f"must be a list of at least one tool, got {_short(listed)}")
        references = enumerate(cast(list[Any], listed))
        return mode, frozenset(_reference(entry, f"{path}.tools[{n}]", names) for n, entry in references)
    raise ParameterError("tool_choice.type", f"must be 'function' or 'allowed_tools', got {_short(kind)}")


def _reference(value: Any, where: str, names: Sequence[str]) -> str:
    """The name of a tool that is pointed to, as `{"function": {"name": ...}}` or `{"name": ...}`."""
    fields = _object(value, where)
    if fields.get("type", "function") != "function":
        raise ParameterError(f"{where}.type", f"only function tools are supported, got {_short(fields['type'])}")
    path = f"{where}.function" if "function" in fields else where
    name = _object(fields.get("function", fields), path).get("name")
    if name not in names:
        raise ParameterError(f"{path}.name", f"is none of the tools ({', '.join(names[:8])}), got {_short(name)}")
    return cast(str, name)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(where, f"must be an object, got {_short(value)}")
    return dict(cast(Mapping[str, Any], value))


def _short(value: object) -> str:
    """A value for a message: never a wall of text."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"
