"""Reading requests: strict JSON bodies, and what is said when a field is unknown, unsupported or of the wrong type.

Owns the body parser and the words for validation errors. Knows no route and no field beyond those that other servers have. Called
by the request models, the routes and `server.http.errors`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, cast

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from legato.server.engine.submission import RequestRefused
from legato.types import ParameterError

SHOWN = 64
"""Characters of a wrong value that a message repeats."""

MAX_ITEMS = 20_000
"""Most messages or items of a conversation: each is checked between everyone else's tokens. Those of a million tokens have
fewer."""

INSTEAD = {
    "best_of": "n gives that many choices",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "ebnf": 'use response_format {"type": "grammar", "grammar": ...} in Lark notation',
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": 'use response_format {"type": "regex", "regex": ...}',
    "guided_grammar": 'use response_format {"type": "grammar", "grammar": ...} in Lark notation',
    "guided_json": 'use response_format {"type": "json_schema", ...}',
    "guided_regex": 'use response_format {"type": "regex", "regex": ...}',
    "json_schema": 'use response_format {"type": "json_schema", ...}',
    "max_tokens": "use max_output_tokens",
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "prompt_cache_options": "every prefix is looked for",
    "reasoning.generate_summary": "use reasoning.summary",
    "response_format": "use text.format",
    "regex": 'use response_format {"type": "regex", "regex": ...}',
    "structural_tag": "use tools",
    "structured_outputs": "use response_format",
    "thinking": 'use chat_template_kwargs {"enable_thinking": ...} and thinking_token_budget',
}
"""What does the job of a field of other servers that is not supported here."""


class RequestModel(BaseModel):
    """A part of a request: exact types, no unknown fields, finite numbers. `null` in an optional field is the same as none."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, value: Any, info: ValidationInfo) -> Any:
        """Names the nearest known field; pydantic's own message would not. What it refuses first is what is told."""
        if isinstance(value, dict):
            known = known_fields(cls)
            for name in cast(dict[str, Any], value):
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "{message}", {"message": unknown(name, cls), "field": name}
                    )
        return cast(Any, value)


def _only(wanted: bool) -> Any:
    """A field with one value that changes nothing: other servers have a choice there."""

    def check(value: bool) -> bool:
        if value is not wanted:
            raise PydanticCustomError("only", "is supported as {wanted} only", {"wanted": str(wanted).lower()})
        return value

    return AfterValidator(check), WithJsonSchema({"type": "boolean", "const": wanted})


OnlyTrue = Annotated[bool, *_only(True)]
OnlyFalse = Annotated[bool, *_only(False)]


def unknown(name: str, model: type[BaseModel]) -> str:
    """Why a field is refused, and what to use instead."""
    shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
    hint = INSTEAD.get(name, "")
    field = re.match(r"use ([a-z_]+)", hint)
    if hint and (field is None or field[1] in known_fields(model)):
        return f"{shown} is not supported: {hint}"
    near = difflib.get_close_matches(name[:SHOWN], known_fields(model), n=1, cutoff=0.6)
    return f"{shown} is not supported" + (f"; did you mean {near[0]}?" if near else "")


@cache
def known_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """The names under which a request gives the fields of `model`."""
    return tuple(info.alias or name for name, info in model.model_fields.items())


@dataclass(frozen=True, slots=True)
class Problem:
    """The first thing that is wrong with a request: its field (`tools[2].function.name`), in words, and as a code."""

    field: str | None
    message: str
    code: str | None = None


_WORDS = {
    "missing": "is required",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "none_required": "is not supported",
}


def first_problem(errors: Sequence[Any]) -> Problem:
    """What to tell of pydantic's list of errors: those of the most specific place, the first of them."""
    deepest = max(_depth(entry) for entry in errors) if _is_union(errors) else 0
    error = next(entry for entry in errors if _depth(entry) >= deepest)
    where = _path(error["loc"])
    kind, context = str(error["type"]), cast(Mapping[str, Any], error.get("ctx") or {})
    if kind == "unknown_field":
        field = f"{where}.{context['field']}" if where else str(context["field"])
        return Problem(
            field, f"{where}: {context['message']}" if where else context["message"], "unsupported_parameter"
        )
    if kind == "none_required":
        name = where or "the field"
        hint = INSTEAD.get(name)
        message = f"{name} is not supported" + (f": {hint}" if hint else "")
        return Problem(where, message, "unsupported_parameter")
    words = _words(error)
    if deepest:
        alternatives = (_words(entry) for entry in errors if _depth(entry) == deepest and _path(entry["loc"]) == where)
        words = " or ".join(dict.fromkeys(alternatives)).replace(" or must be ", " or ")
    if not where:
        return Problem(None, "the body " + ("is required, as a JSON object" if kind == "missing" else words))
    return Problem(
        where, f"{where}: {words}{_shown(kind, error)}", "missing_required_parameter" if kind == "missing" else None
    )


def _words(error: Mapping[str, Any]) -> str:
    if error["type"] == "union_tag_invalid":
        return f"the type {str(error['ctx']['tag'])[:SHOWN]!r} is none of {error['ctx']['expected_tags']}"
    known = _WORDS.get(str(error["type"]))
    return known or re.sub(r"^(Input|String|List|Dictionary|Value|Data) should ", "must ", str(error["msg"]))


def _shown(kind: str, error: Mapping[str, Any]) -> str:
    value: Any = error.get("input")
    if kind == "missing" or not isinstance(value, str | int | float | bool | None):
        return ""
    text = repr(value) if not isinstance(value, str) or len(value) <= SHOWN else repr(value[:SHOWN]) + "..."
    return f", got {text[: 2 * SHOWN]}"


def _is_union(errors: Sequence[Any]) -> bool:
    return len(errors) > 1 and len({_path(error["loc"][:2]) for error in errors}) == 1


def _depth(error: Mapping[str, Any]) -> int:
    return len(error["loc"])


def _path(location: Sequence[Any]) -> str:
    """`("body", "messages", 3, "role")` as `messages[3].role`; names of union members are left out."""
    text, before = "", ""
    for part in location[1:] if location and location[0] in ("body", "query", "path", "header") else location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_union_member(str(part)) and not (
            before in ("response_format", "format") and part in RESPONSE_FORMATS
        ):
            text += f".{part}" if text else str(part)
        before = str(part)
    return text[:256]


Spelling = Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]
"""Patterns of fields' names, and what stands in their place, as `re.sub` takes it."""


@contextmanager
def respelled(spelling: Spelling) -> Generator[None]:
    """Tells faults in fields by the names that they have in the API that was asked."""
    try:
        yield
    except ParameterError as error:
        name = _spelled(error.name, spelling)
        raise ParameterError(name, str(error).removeprefix(f"{error.name}: ")) from error
    except RequestRefused as refused:
        name = _spelled(refused.field, spelling)
        if name == refused.field:
            raise
        message = re.sub(rf"\b{re.escape(refused.field)}\b", lambda _: name, refused.message, count=1)
        raise RequestRefused(refused.kind, name, message) from refused


def _spelled(name: str, spelling: Spelling) -> str:
    for pattern, ours in spelling:
        name = pattern.sub(ours, name)
    return name


def _is_union_member(part: str) -> bool:
    return "[" in part or part in _MEMBERS or (part[:1].isupper() and part.isidentifier())


RESPONSE_FORMATS = frozenset({"text", "json_object", "json_schema", "regex", "grammar"})
_MEMBERS = frozenset({"str", "int", "float", "bool", "none", "dict", "function-wrap", "function-before"})


class BodyError(HTTPException):
    """A body that is no JSON."""


class JsonRequest(Request):
    """A request whose body is strict JSON: no NaN, no lone surrogates, no nesting that could exhaust a stack."""

    async def json(self) -> Any:
        """The parsed body. Raises `BodyError`."""
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """Strict JSON. Raises `BodyError`."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise BodyError(400, "the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BodyError(400, f"the body is not valid JSON in UTF-8: {error}") from None


class JsonRoute(APIRoute):
    """A route whose body must be `application/json`: other types could be sent by any page that a browser shows."""

    methods_with_body: ClassVar[frozenset[str]] = frozenset({"POST", "PUT"})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with the body read strictly."""
        original, takes_body = super().get_route_handler(), self.body_field is not None

        async def handle(request: Request) -> Response:
            if takes_body:
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json" and not kind.endswith("+json"):
                    raise HTTPException(
                        415, f"the body must be application/json, got {kind[:SHOWN] or 'no content type'}"
                    )
                coding = request.headers.get("content-encoding", "identity").strip().lower()
                if coding != "identity":
                    raise HTTPException(415, f"the body must come as it is, got the content encoding {coding[:SHOWN]}")
            strict = JsonRequest(request.scope, request.receive)
            if takes_body:
                await strict.body()  # FastAPI would make a bad request of a client that leaves before its end
            return await original(strict)

        return handle
