"""Arguments of tool calls: from the text that the model wrote to JSON, by the tool's JSON schema.

Owns which types a schema allows for an argument and the one rule that turns text into a JSON value. Pure functions; knows
nothing of tokens or HTTP. Called by `server.tools.definitions`, `server.tools.call` and `server.answer.constraint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn, cast

Schema = Mapping[str, Any]
Types = frozenset[str]

UNKNOWN: Types = frozenset()
"""Nothing is said about the type."""
STRING: Types = frozenset({"string"})
NULLABLE_STRING: Types = frozenset({"string", "null"})
JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_DEPTH = 32
"""How deep references and alternatives of a schema are followed."""
_PYTHON = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def types_of(schema: Any, root: Schema) -> Types:
    """The JSON types that `schema` allows; `UNKNOWN` where it does not say. `root` is what `#/...` references start from."""
    return _types(schema, root, {}, 0)


def _types(schema: Any, root: Schema, known: dict[int, Types], depth: int) -> Types:
    """As `types_of`; `known` by identity, so that a schema whose references fan out, or go round, is read once."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return UNKNOWN
    schema = cast(Schema, schema)
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = UNKNOWN
    parts = [part for part in _declared(schema, lambda inner: _types(inner, root, known, depth + 1), root) if part]
    found = (frozenset[str].intersection(*parts) or parts[0]) if parts else UNKNOWN
    known[id(schema)] = found | {"null"} if found and schema.get("nullable") is True else found
    return known[id(schema)]


def _declared(schema: Schema, types: Callable[[Any], Types], root: Schema) -> Iterator[Types]:
    """What each keyword of a schema says about the type; `types` reads the schemas in it."""
    if "$ref" in schema:
        yield types(resolve(schema["$ref"], root))
    if "const" in schema:
        yield frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        yield frozenset(map(type_of, schema["enum"]))
    declared: Any = schema.get("type")
    if declared is not None:
        names = cast(list[Any], declared if isinstance(declared, list) else [declared])
        known = frozenset(name for name in names if isinstance(name, str)) & JSON_TYPES
        yield known if len(known) == len(names) else UNKNOWN
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [types(branch) for branch in schema[keyword]]
            yield UNKNOWN if UNKNOWN in branches else frozenset().union(*branches)
    if isinstance(schema.get("allOf"), list):
        yield from map(types, schema["allOf"])
    if declared is None and ("properties" in schema or "additionalProperties" in schema):
        yield frozenset({"object"})
    if declared is None and ("items" in schema or "prefixItems" in schema):
        yield frozenset({"array"})


def type_of(value: Any) -> str:
    """The JSON type of a parsed value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number" if isinstance(value, float) else "integer"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def resolve(reference: Any, root: Schema) -> Any:
    """What a `#/...` reference points to, or `None`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = cast(Schema, place).get(step)
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(cast(list[Any], place)):
            place = cast(list[Any], place)[int(step)]
        else:
            return None
    return place


def argument_schemas(parameters: Schema, name: str) -> list[Any]:
    """What `parameters`, the schema of a tool's arguments, says about the argument `name`; empty where it says nothing."""
    return _declarations(parameters, name, parameters) or _declarations(parameters, None, parameters)


def _declarations(parameters: Schema, name: str | None, root: Schema) -> list[Any]:
    """Schemas of the property `name`, or with `None` those of any other property, wherever `parameters` has them."""
    found: list[Any] = []
    seen: set[int] = set()
    left: list[Any] = [parameters]
    while left:
        schema = left.pop(0)
        if not isinstance(schema, Mapping) or id(cast(Schema, schema)) in seen:
            continue
        schema = cast(Schema, schema)
        seen.add(id(schema))
        found += _declared_here(schema, name)
        left += [resolve(schema["$ref"], root)] if "$ref" in schema else []
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches: Any = schema.get(keyword)
            left += cast(list[Any], branches) if isinstance(branches, list) else []
    return found


def _declared_here(schema: Schema, name: str | None) -> Iterator[Any]:
    properties: Any = schema.get("properties")
    if name is None and isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]
    if name is not None and isinstance(properties, Mapping) and name in cast(Schema, properties):
        yield cast(Schema, properties)[name]


def argument_types(parameters: Schema, name: str) -> Types:
    """The JSON types that a tool's schema allows for the argument `name`; `UNKNOWN` for one that it does not declare."""
    found = [types_of(schema, parameters) for schema in argument_schemas(parameters, name)]
    return UNKNOWN if not found or UNKNOWN in found else frozenset().union(*found)


def json_value(text: str, types: Types) -> str:
    """The JSON text of an argument that the model wrote as `text`.

    A declared string is kept as it is, to the last space. Other types are JSON in the model's own writing (so numbers keep
    all their digits); `True`, `False` and `None` are taken for what they mean where the schema has that type. Where a string is
    one of several types, the others come first if the text is exactly a value of theirs; where nothing is declared, text that
    is JSON (but no JSON string) counts as JSON. Whatever fits nothing becomes a string: the result is always valid JSON.
    """
    if types == STRING:
        return json_string(text)
    if "string" not in types and types:
        bare = text.strip(" \t\r\n")
        kind, spelled = _PYTHON.get(bare, ("", ""))
        if kind in types:
            return spelled
        return bare if json_type(bare) is not None else json_string(text)
    kind = json_type(text) if text == text.strip(" \t\r\n") else None
    allowed = types | {"integer", "number"} if types & {"integer", "number"} else types
    is_other = kind is not None and kind != "string" and (not types or kind in allowed)
    return text if is_other else json_string(text)


def json_string(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_type(text: str) -> str | None:
    """The type of a JSON text, `None` if it is none. NaN and infinities are none; numbers may have any number of digits."""
    try:
        value: Any = json.loads(text, parse_int=_Integer, parse_float=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return "integer" if isinstance(value, _Integer) else type_of(value)


class _Integer(str):
    """A whole number that nobody needs the value of: Python refuses to convert very long ones."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_MARKS = re.compile(r'"(?:[^"\\]|\\.)*("|\\?\Z)|[\[\]{},]', re.DOTALL)
_HALF_ENTRY = {
    "}": re.compile(r',?\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*[\w.+-]*\s*)?)?)?\Z', re.DOTALL),
    "]": re.compile(r",?\s*[\w.+-]*\s*\Z"),
}
"""What may stand behind the last whole entry of an unfinished object or list, by how it would be closed."""
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")


def told_arguments(text: str) -> Any:
    """The arguments of an earlier call, as JSON text that a client sends back. Those of a call that was cut, which end in the
    middle of their object, are completed: the model sees what it had written.

    Raises:
        ValueError: it is no JSON, and no beginning of an object.
    """
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        for whole in _completions(text):
            with suppress(ValueError, RecursionError):
                return json.loads(whole)
        raise


def _completions(text: str) -> Iterator[str]:
    """An unfinished object, closed where it ends, and before the entry in which it ends."""
    closing, whole, is_in_string = "", 0, False
    for mark in _MARKS.finditer(text if text.lstrip().startswith("{") else ""):
        match mark[0][0]:
            case '"':
                is_in_string = mark[1] != '"'
            case "{" | "[" as opening:
                closing, whole = ("}" if opening == "{" else "]") + closing, mark.end()
            case ",":
                whole = mark.start()
            case _:
                closing = closing[1:]
    if closing:
        yield (_HALF_ESCAPE.sub(r"\1", text) + '"' if is_in_string else text) + closing
        if _HALF_ENTRY[closing[0]].match(text, whole):
            yield text[:whole] + closing
