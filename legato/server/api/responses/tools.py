"""The tools of a request to /v1/responses: functions and free-form tools, alone or grouped in namespaces, as the one list that a
model is shown.

Owns the fields of tools here, the name under which a model sees a tool of a namespace, and the way back from it. Knows nothing of
prompts or replies. Called by `server.api.responses.request`, `server.api.responses.input` and `server.api.responses.output`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import WithJsonSchema

from legato.server.tools.definitions import CUSTOM_FIELDS, NAME, Tools, custom_schema, refuse_others
from legato.types import ParameterError

TOOL_FIELDS = {
    "function": ("type", "name", "description", "parameters", "strict"),
    "custom": ("type", *CUSTOM_FIELDS),
    "namespace": ("type", "name", "description", "tools"),
}
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
CUSTOM_SCHEMA = custom_schema("CustomTool", is_nested=False)
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
        every: each in the flat form, without its empty fields; those of a namespace under their joined names. The first one of a
            namespace tells what the namespace is for.
        places: the field that each comes from.
        homes: of those in namespaces, by their joined names.
    """

    every: tuple[dict[str, Any], ...]
    places: tuple[str, ...]
    homes: Mapping[str, Home]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> FlatTools:
        """From the tools of a request. Raises `ParameterError`, which names the field."""
        every: list[dict[str, Any]] = []
        places: list[str] = []
        homes: dict[str, Home] = {}
        for number, tool in enumerate(tools):
            where = f"tools[{number}]"
            if tool.get("type") != "namespace":
                every.append(_tool(tool, where))
                places.append(where)
                continue
            for place, inner in enumerate(_namespace(tool, where)):
                home = Home(tool["name"], inner["name"])
                homes[home.joined] = home
                every.append({**inner, "name": home.joined})
                places.append(f"{where}.tools[{place}]")
        return cls(tuple(every), tuple(places), homes)

    def chosen(self, tool_choice: Any, parallel_tool_calls: bool | None) -> Tools | None:
        """The tools, and which may be called. Raises `ParameterError` with names of fields in the flat list."""
        return Tools.from_openai(list(self.every), tool_choice, parallel_tool_calls)

    def place_of(self, match: re.Match[str]) -> str:
        """The place in the request of what `PLACE` has matched in the flat list; for `validation.respelled`."""
        return self.places[int(match[1])]


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function or a free-form tool, without its empty fields."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise ParameterError(
            f"{where}.type",
            "only functions and custom tools, alone or in a namespace, are supported: no tool runs on this server, so switch it "
            f"off where you ask from; got {kind!r:.80}",
        )
    known, what = TOOL_FIELDS[kind], "a function" if kind == "function" else "a custom tool"
    given = {name: value for name, value in tool.items() if not (name == "defer_loading" and value is False)}
    refuse_others(given, known, where, what)
    return {name: tool[name] for name in known if tool.get(name) is not None}


def _namespace(tool: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools of a namespace."""
    refuse_others(tool, TOOL_FIELDS["namespace"], where, "a namespace")
    name, listed, purpose = tool.get("name"), tool.get("tools"), tool.get("description")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ParameterError(
            f"{where}.name", f'must be 1 to 256 characters without spaces and without any of <>{{}}", got {name!r:.80}'
        )
    if not isinstance(purpose, str | None):
        raise ParameterError(f"{where}.description", f"must be text, got {purpose!r:.80}")
    if not isinstance(listed, list) or not listed:
        raise ParameterError(f"{where}.tools", f"must be a list of at least one tool, got {listed!r:.80}")
    found: list[dict[str, Any]] = []
    for number, inner in enumerate(cast(list[Any], listed)):
        place = f"{where}.tools[{number}]"
        if not isinstance(inner, Mapping):
            raise ParameterError(place, f"must be an object, got {inner!r:.80}")
        one = _tool(cast(Mapping[str, Any], inner), place)
        if not isinstance(one.get("name"), str):
            raise ParameterError(f"{place}.name", "is required, as text")
        found.append(one)
    own = found[0].get("description")
    if purpose and isinstance(own, str | None):
        found[0]["description"] = f"{name}: {purpose}\n\n{own or ''}".rstrip()
    return found
