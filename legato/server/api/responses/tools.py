"""The tools of a request to /v1/responses: functions, alone or grouped in namespaces, as the one list that a model is shown.

Owns the flat form of tools, the name under which a model sees a function of a namespace, and the way back from it. Knows nothing
of prompts or replies. Called by `server.api.responses.request`, `server.api.responses.input` and `server.api.responses.output`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import WithJsonSchema

from legato.server.tools.definitions import NAME
from legato.types import ParameterError

TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
NAMESPACE_FIELDS = ("type", "name", "description", "tools")
PLACE = re.compile(r"^tools\[(\d+)\]")
"""A function in the flat list, as faults name it."""
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
NAMESPACE_SCHEMA: dict[str, Any] = {
    "title": "NamespaceTool",
    "type": "object",
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "tools": {"type": "array", "items": FUNCTION_SCHEMA, "minItems": 1},
    },
    "required": ["type", "name", "tools"],
}
ToolOfRequest = Annotated[dict[str, Any], WithJsonSchema({"anyOf": [FUNCTION_SCHEMA, NAMESPACE_SCHEMA]})]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a function of a namespace belongs: the two names that its calls have in this API."""

    namespace: str
    name: str

    @property
    def joined(self) -> str:
        """What the model calls it."""
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class FlatTools:
    """The functions of a request in one list.

    Attributes:
        functions: each in the flat form, without its empty fields; those of a namespace under their joined names. The first one
            of a namespace tells what the namespace is for.
        places: the field that each comes from.
        homes: of those in namespaces, by their joined names.
    """

    functions: tuple[dict[str, Any], ...]
    places: tuple[str, ...]
    homes: Mapping[str, Home]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> FlatTools:
        """From the tools of a request. Raises `ParameterError`, which names the field."""
        functions: list[dict[str, Any]] = []
        places: list[str] = []
        homes: dict[str, Home] = {}
        for number, tool in enumerate(tools):
            where = f"tools[{number}]"
            if tool.get("type") != "namespace":
                functions.append(_function(tool, where))
                places.append(where)
                continue
            for inner, function in enumerate(_namespace(tool, where)):
                home = Home(tool["name"], function["name"])
                homes[home.joined] = home
                functions.append({**function, "name": home.joined})
                places.append(f"{where}.tools[{inner}]")
        return cls(tuple(functions), tuple(places), homes)

    def place_of(self, match: re.Match[str]) -> str:
        """The place in the request of what `PLACE` has matched in the flat list; for `validation.respelled`."""
        return self.places[int(match[1])]


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function in the flat form, without its empty fields."""
    kind = tool.get("type")
    if kind != "function":
        raise ParameterError(
            f"{where}.type",
            "only functions, alone or in a namespace, are supported: no tool runs on this server, so switch it off where you "
            f"ask from; got {kind!r:.80}",
        )
    for name, value in tool.items():
        if name not in TOOL_FIELDS and value is not None and not (name == "defer_loading" and value is False):
            raise ParameterError(f"{where}.{name[:64]}", f"is not supported; a function has {', '.join(TOOL_FIELDS)}")
    return {name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None}


def _namespace(tool: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The functions of a namespace."""
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
        raise ParameterError(f"{where}.tools", f"must be a list of at least one function, got {listed!r:.80}")
    functions: list[dict[str, Any]] = []
    for number, inner in enumerate(cast(list[Any], listed)):
        place = f"{where}.tools[{number}]"
        if not isinstance(inner, Mapping):
            raise ParameterError(place, f"must be an object, got {inner!r:.80}")
        function = _function(cast(Mapping[str, Any], inner), place)
        if not isinstance(function.get("name"), str):
            raise ParameterError(f"{place}.name", "is required, as text")
        functions.append(function)
    own = functions[0].get("description")
    if purpose and isinstance(own, str | None):
        functions[0]["description"] = f"{name}: {purpose}\n\n{own or ''}".rstrip()
    return functions
