"""The tools of a request to /v1/responses: functions and free-form tools, alone or grouped in namespaces, as the one list that a
model is shown.

Owns the flat form of tools, the name under which a model sees a tool of a namespace, and the way back from it. Knows nothing of
prompts or replies. Called by `server.api.responses.request`, `server.api.responses.input` and `server.api.responses.output`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import WithJsonSchema

from legato.server.tools.definitions import NAME, Tools
from legato.server.tools.freeform import TextGrammar, parameters
from legato.types import ParameterError

TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
CUSTOM_FIELDS = ("type", "name", "description", "format")
NAMESPACE_FIELDS = ("type", "name", "description", "tools")
PLACE = re.compile(r"^tools\[(\d+)\]")
"""A tool in the flat list, as faults name it."""
FUNCTION_SCHEMA: dict[str, Any] = {
    "title": "FunctionTool",
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "JSON schema of the arguments."},
        "strict": {"type": ["boolean", "null"], "description": "Whether the arguments must fit it; left out: no."},
    },
    "required": ["type", "name"],
}
CUSTOM_SCHEMA: dict[str, Any] = {
    "title": "CustomTool",
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "format": {
            "anyOf": [
                {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "grammar"},
                        "syntax": {"enum": ["lark", "regex"]},
                        "definition": {"type": "string"},
                    },
                    "required": ["type", "syntax", "definition"],
                },
                {"type": "null"},
            ],
            "description": "What its input looks like; a grammar is enforced.",
        },
    },
    "required": ["type", "name"],
}
NAMESPACE_SCHEMA: dict[str, Any] = {
    "title": "NamespaceTool",
    "type": "object",
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "tools": {"type": "array", "items": {"anyOf": [FUNCTION_SCHEMA, CUSTOM_SCHEMA]}, "minItems": 1},
    },
    "required": ["type", "name", "tools"],
}
ToolOfRequest = Annotated[dict[str, Any], WithJsonSchema({"anyOf": [FUNCTION_SCHEMA, CUSTOM_SCHEMA, NAMESPACE_SCHEMA]})]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tool of a namespace belongs: the two names that its calls have in this API."""

    namespace: str
    name: str

    @property
    def joined(self) -> str:
        """What the model calls it."""
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class FlatTools:
    """The tools of a request in one list.

    Attributes:
        functions: each in the flat form, without its empty fields; those of a namespace under their joined names. The first one
            of a namespace tells what the namespace is for. A free-form tool is a function of one text.
        places: the field that each comes from.
        homes: of those in namespaces, by their joined names.
        custom: the names of free-form tools, and the grammars that their texts must follow, if any.
    """

    functions: tuple[dict[str, Any], ...]
    places: tuple[str, ...]
    homes: Mapping[str, Home]
    custom: Mapping[str, TextGrammar | None]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> FlatTools:
        """From the tools of a request. Raises `ParameterError`, which names the field."""
        functions: list[dict[str, Any]] = []
        places: list[str] = []
        homes: dict[str, Home] = {}
        custom: dict[str, TextGrammar | None] = {}
        for number, tool in enumerate(tools):
            where = f"tools[{number}]"
            if tool.get("type") != "namespace":
                functions.append(_tool(tool, where))
                places.append(where)
                if tool.get("type") == "custom":
                    custom[str(tool.get("name"))] = _grammar(tool, where)
                continue
            for inner, function in enumerate(_namespace(tool, where)):
                home, place = Home(tool["name"], function["name"]), f"{where}.tools[{inner}]"
                homes[home.joined] = home
                functions.append({**function, "name": home.joined})
                places.append(place)
                if tool["tools"][inner].get("type") == "custom":
                    custom[home.joined] = _grammar(tool["tools"][inner], place)
        return cls(tuple(functions), tuple(places), homes, custom)

    def chosen(self, tool_choice: Any, parallel_tool_calls: bool | None) -> Tools | None:
        """The tools, and which may be called. Raises `ParameterError` with names of fields in the flat list."""
        tools = Tools.from_openai(list(self.functions), _choice(tool_choice), parallel_tool_calls)
        return None if tools is None else tools.following(self.custom)

    def place_of(self, match: re.Match[str]) -> str:
        """The place in the request of what `PLACE` has matched in the flat list; for `validation.respelled`."""
        return self.places[int(match[1])]


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function or a free-form tool as a function in the flat form, without its empty fields."""
    kind = tool.get("type")
    if kind == "custom":
        return _custom(tool, where)
    if kind != "function":
        raise ParameterError(
            f"{where}.type",
            "only functions and custom tools, alone or in a namespace, are supported: no tool runs on this server, so switch it "
            f"off where you ask from; got {kind!r:.80}",
        )
    for name, value in tool.items():
        if name not in TOOL_FIELDS and value is not None and not (name == "defer_loading" and value is False):
            raise ParameterError(f"{where}.{name[:64]}", f"is not supported; a function has {', '.join(TOOL_FIELDS)}")
    return {name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None}


def _custom(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A free-form tool as a function of one text."""
    for name, value in tool.items():
        if name not in CUSTOM_FIELDS and value is not None and not (name == "defer_loading" and value is False):
            raise ParameterError(
                f"{where}.{name[:64]}", f"is not supported; a custom tool has {', '.join(CUSTOM_FIELDS)}"
            )
    shown = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", **shown, "parameters": parameters(_grammar(tool, where))}


def _grammar(tool: Mapping[str, Any], where: str) -> TextGrammar | None:
    """What the text of a free-form tool must follow."""
    wanted: Any = tool.get("format")
    if wanted is None:
        return None
    path = f"{where}.format"
    if not isinstance(wanted, Mapping):
        raise ParameterError(path, f"must be an object with a type, got {wanted!r:.80}")
    fields = cast(Mapping[str, Any], wanted)
    kind, syntax, definition = fields.get("type"), fields.get("syntax"), fields.get("definition")
    known = ("type", "syntax", "definition") if kind == "grammar" else ("type",)
    for name, value in fields.items():
        if name not in known and value is not None:
            raise ParameterError(
                f"{path}.{name[:64]}", f"is not supported; a format of type {kind!r:.80} has {', '.join(known)}"
            )
    if kind == "text":
        return None
    if kind != "grammar":
        raise ParameterError(f"{path}.type", f"must be text or grammar, got {kind!r:.80}")
    if syntax not in ("lark", "regex"):
        raise ParameterError(f"{path}.syntax", f"must be lark or regex, got {syntax!r:.80}")
    if not isinstance(definition, str) or not definition:
        raise ParameterError(f"{path}.definition", f"must be text, got {definition!r:.80}")
    return TextGrammar(syntax, definition)


def _choice(tool_choice: Any) -> Any:
    """A choice in which free-form tools are the functions that they are shown as."""
    if not isinstance(tool_choice, Mapping):
        return tool_choice
    choice = dict(cast(Mapping[str, Any], tool_choice))
    if choice.get("type") == "custom":
        choice["type"] = "function"
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        choice["tools"] = [_choice(each) for each in choice["tools"]]
    return choice


def _namespace(tool: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools of a namespace."""
    for name, value in tool.items():
        if name not in NAMESPACE_FIELDS and value is not None:
            raise ParameterError(
                f"{where}.{name[:64]}", f"is not supported; a namespace has {', '.join(NAMESPACE_FIELDS)}"
            )
    name, listed, purpose = tool.get("name"), tool.get("tools"), tool.get("description")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ParameterError(
            f"{where}.name", f'must be 1 to 256 characters without spaces and without any of <>{{}}", got {name!r:.80}'
        )
    if not isinstance(purpose, str | None):
        raise ParameterError(f"{where}.description", f"must be text, got {purpose!r:.80}")
    if not isinstance(listed, list) or not listed:
        raise ParameterError(f"{where}.tools", f"must be a list of at least one tool, got {listed!r:.80}")
    functions: list[dict[str, Any]] = []
    for number, inner in enumerate(cast(list[Any], listed)):
        place = f"{where}.tools[{number}]"
        if not isinstance(inner, Mapping):
            raise ParameterError(place, f"must be an object, got {inner!r:.80}")
        function = _tool(cast(Mapping[str, Any], inner), place)
        if not isinstance(function.get("name"), str):
            raise ParameterError(f"{place}.name", "is required, as text")
        functions.append(function)
    own = functions[0].get("description")
    if purpose and isinstance(own, str | None):
        functions[0]["description"] = f"{name}: {purpose}\n\n{own or ''}".rstrip()
    return functions
