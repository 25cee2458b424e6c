"""A tool's JSON schema as a grammar of GLM's argument notation: strings as they are, everything else as JSON.

Owns the translation of one schema into rules in llguidance's Lark notation. Knows nothing of tokens, of choices among tools, or
of what has been generated. Called by `server.answer.constraint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from legato.server.tools.arguments import MAX_DEPTH, UNKNOWN, Schema, resolve, types_of
from legato.server.tools.call import END_KEY, END_VALUE, KEY, VALUE

TERMINALS = (r"TEXT: /(?s:.+)/", r"KEY: /[^\r\n]{1,256}/")
ANY_VALUE = "TEXT?"
ANY_ARGUMENTS = f"({KEY} KEY {END_KEY} {VALUE} {ANY_VALUE} {END_VALUE})*"
"""Arguments of any name and value."""
NO_ARGUMENTS = '""'
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords that allow and forbid nothing."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it, and so as the model has seen it."""


class SchemaError(ValueError):
    """A schema of a text argument that has no grammar here. The message says why."""


@dataclass(frozen=True, slots=True)
class ValueRule:
    """The grammar of one argument's value: `rule` is the right side, `terminals` what it needs besides `TERMINALS`."""

    argument: str
    name: str
    rule: str
    terminals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArgumentsGrammar:
    """All arguments of a tool: their `sequence` (the right side of a rule) and the rules of the values named in it."""

    sequence: str
    values: tuple[ValueRule, ...]


def arguments_grammar(parameters: Schema, prefix: str) -> ArgumentsGrammar | None:
    """The arguments in the order in which the schema lists them, required ones always; `None` where it does not list them.

    Without a schema, or with an empty list of properties, there are no arguments. Names of rules start with `prefix`.

    Raises:
        SchemaError: the values of an argument cannot be put into a grammar.
    """
    schema = parameters
    if "$ref" in schema:
        target = resolve(schema["$ref"], parameters)
        schema = cast(Schema, target) if isinstance(target, Mapping) else {}
    if not schema:
        return ArgumentsGrammar(NO_ARGUMENTS, ())
    properties: Any = schema.get("properties")
    if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties")):
        return None
    required: Any = schema.get("required")
    needed = set(cast(list[Any], required)) if isinstance(required, list) else set[Any]()
    values: list[ValueRule] = []
    sequence: list[str] = []
    for number, (argument, inner) in enumerate(cast(Schema, properties).items()):
        translation = _Translation(parameters, f"{prefix}_{number}")
        values.append(translation.value(argument, inner))
        pair = f"{KEY} {json.dumps(argument)} {END_KEY} {VALUE} {prefix}_{number} {END_VALUE}"
        sequence.append(pair if argument in needed else f"({pair})?")
    return ArgumentsGrammar(" ".join(sequence) or NO_ARGUMENTS, tuple(values))


def json_rule(schema: Schema, root: Schema | None = None) -> str:
    """JSON text of a schema, spaced in one way. Definitions that `schema` refers to are taken from `root`.

    Raises:
        SchemaError: the schema is nested too deeply to be written down.
    """
    definitions = {}
    try:
        if root is not None and '"$ref"' in json.dumps(schema):
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"%json {json.dumps({**definitions, **schema, 'x-guidance': _SPACING})}"
    except RecursionError as error:
        raise SchemaError("it is nested too deeply") from error


def regex_literal(pattern: str) -> str:
    """A regular expression between slashes, as Lark notation writes it: the literal means what the expression means.

    Raises:
        SchemaError: the expression ends in a backslash that escapes nothing, and would escape the closing slash.
    """

    def written(match: re.Match[str]) -> str:
        piece = match[0]
        if piece == "\\":
            raise SchemaError("a regular expression cannot end in a single backslash")
        return {"/": r"\/", "\\\n": r"\n"}.get(piece, piece)

    # A backslash goes with the character behind it, whatever that is.
    body = re.sub(r"\\.|\\|/", written, pattern, flags=re.DOTALL)
    return f"/{body or '(?:)'}/"


class _Translation:
    """One argument's schema on its way into a rule."""

    def __init__(self, root: Schema, prefix: str) -> None:
        self._root, self._prefix = root, prefix
        self._terminals: list[str] = []
        self._seen: set[int] = set()

    def value(self, argument: str, schema: Any) -> ValueRule:
        alternatives = list(dict.fromkeys(self._alternatives(schema, 0)))
        rule = ANY_VALUE if ANY_VALUE in alternatives else " | ".join(alternatives)
        return ValueRule(argument, self._prefix, rule, tuple(self._terminals))

    def _alternatives(self, schema: Any, depth: int) -> Iterator[str]:
        if depth > MAX_DEPTH:
            raise SchemaError(f"references and alternatives are nested more than {MAX_DEPTH} deep")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        types = types_of(schema, self._root)
        if types == UNKNOWN or not isinstance(schema, Mapping):
            yield ANY_VALUE
            return
        schema = cast(Schema, schema)
        if "string" not in types:
            yield json_rule(_bare(schema), self._root)
        elif "$ref" in schema:
            yield from self._alternatives(resolve(schema["$ref"], self._root), depth + 1)
        elif "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else cast(list[Any], schema["enum"])
            yield from (json.dumps(value if isinstance(value, str) else json.dumps(value)) for value in values)
        elif "allOf" in schema:
            yield from self._alternatives(_merged(schema), depth + 1)
        elif branches := [key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]:
            for branch in cast(list[Any], schema[branches[0]]):
                yield from self._alternatives(branch, depth + 1)
        else:
            yield self._text(schema)
            if others := sorted(types - {"string"}):
                yield json_rule({**_bare(schema), "type": others}, self._root)

    def _text(self, schema: Schema) -> str:
        """Text as it is, within the bounds that the schema sets."""
        parts: list[str] = []
        least, most, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
        for bound in (least, most):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
                raise SchemaError(f"a length must be a whole number, got {bound!r:.40}")
        if not isinstance(pattern, str | None):
            raise SchemaError(f"a pattern must be text, got {pattern!r:.40}")
        if least is not None or most is not None:
            parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
        if pattern is not None:
            parts.append(regex_literal(_whole(pattern)))
        if not parts:
            return ANY_VALUE
        name = f"{self._prefix.upper()}_{len(self._terminals)}"
        self._terminals.append(f"{name}: {' & '.join(parts)}")
        return name


def _bare(schema: Schema) -> Schema:
    """A schema without what it says to people: then those of many arguments are the same."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _merged(schema: Schema) -> Schema:
    """`allOf` as one schema, where the parts say nothing about the same thing."""
    merged = {key: value for key, value in schema.items() if key != "allOf"}
    for part in cast(Sequence[Any], schema["allOf"]):
        for key, value in cast(Schema, part).items() if isinstance(part, Mapping) else ():
            if merged.setdefault(key, value) != value:
                raise SchemaError(f"the parts of its allOf disagree about {key}")
    return merged


def _whole(pattern: str) -> str:
    """A JSON schema pattern, which may match anywhere, as one that the whole text must match."""
    return "|".join(map(_anchored, _branches(pattern)))


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern: its parts between `|` outside groups and classes."""
    branches, depth, in_class = [""], 0, False
    for piece in re.findall(r"\\.|[^\\]|\\$", pattern, re.DOTALL):
        in_class = piece != "]" if in_class else piece == "["
        depth += 0 if in_class else (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not in_class:
            branches.append("")
        else:
            branches[-1] += piece
    return branches


def _anchored(branch: str) -> str:
    """An alternative without its anchors, and with any text where it has none."""
    anywhere = "(?s:.*)"
    is_start, is_end = branch.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", branch) is not None
    body = branch[is_start : len(branch) - is_end]
    return f"{'' if is_start else anywhere}{body}{'' if is_end else anywhere}"
