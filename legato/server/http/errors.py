"""What goes wrong with a request, in one form, and how it is said in the OpenAI and the Anthropic dialect.

Owns statuses, error types and the translation of every expected exception. Messages name fields and numbers, never paths, keys or
tracebacks. Knows nothing of routes; the app's exception handlers, the middleware and the streams call it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from legato.server.engine.client import CommandFailed, EngineClosed, EngineFailed, RequestRefused
from legato.server.http.validation import first_problem
from legato.server.text.chat_template import ChatError
from legato.types import ParameterError

LOG = logging.getLogger(__name__)

RETRY_AFTER_S = 1
Dialect = Literal["openai", "anthropic"]


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        param: the field that is wrong, where a single one is.
        code: a word for programs.
        headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


class OpenAIError(TypedDict):
    """What is wrong. `param` is the field's name, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """An error in the form of the OpenAI API."""

    error: OpenAIError


class AnthropicError(TypedDict):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorReply(TypedDict):
    """An error in the form of the Anthropic API."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str | None


@dataclass(frozen=True, slots=True)
class _Names:
    """What a status is called in each dialect, and the code it has where the error brings none."""

    openai: str
    anthropic: str
    code: str | None = None


_NAMES = {
    400: _Names("invalid_request_error", "invalid_request_error"),
    401: _Names("authentication_error", "authentication_error", "invalid_api_key"),
    403: _Names("permission_error", "permission_error"),
    404: _Names("not_found_error", "not_found_error", "not_found"),
    405: _Names("invalid_request_error", "invalid_request_error", "method_not_allowed"),
    408: _Names("invalid_request_error", "invalid_request_error", "body_too_slow"),
    409: _Names("conflict_error", "invalid_request_error"),
    413: _Names("invalid_request_error", "request_too_large", "request_too_large"),
    415: _Names("invalid_request_error", "invalid_request_error", "unsupported_media_type"),
    429: _Names("rate_limit_error", "rate_limit_error", "queue_full"),
    431: _Names("invalid_request_error", "request_too_large", "headers_too_large"),
    500: _Names("server_error", "api_error", "internal_error"),
    503: _Names("overloaded_error", "overloaded_error", "unavailable"),
}
_OTHER = _Names("invalid_request_error", "invalid_request_error")


def reply_of(error: ApiError) -> ErrorReply:
    """The body of an error in the OpenAI dialect."""
    names = _NAMES.get(error.status, _OTHER)
    return {
        "error": {
            "message": error.message,
            "type": names.openai,
            "param": error.param,
            "code": error.code or names.code,
        }
    }


def anthropic_reply_of(error: ApiError, request_id: str | None = None) -> AnthropicErrorReply:
    """The body of an error in the Anthropic dialect."""
    kind = _NAMES.get(error.status, _OTHER).anthropic
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def dialect_of(path: str) -> Dialect:
    """The dialect that a route speaks, for errors too."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def response_to(error: ApiError, path: str, request_id: str | None = None) -> Response:
    """The whole answer to a request at `path` that failed."""
    return Response(
        msgspec.json.encode(body_of(error, path, request_id)), error.status, error.headers, "application/json"
    )


def body_of(error: ApiError, path: str, request_id: str | None = None) -> ErrorReply | AnthropicErrorReply:
    """The body of an error in the dialect of a route."""
    return anthropic_reply_of(error, request_id) if dialect_of(path) == "anthropic" else reply_of(error)


def api_error(error: BaseException) -> ApiError:
    """Any exception as the error that the client is told. What nobody expected is logged, and told without details."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return _refused(error)
        case ParameterError():
            return ApiError(400, str(error), param=error.name)
        case ChatError():
            return ApiError(400, str(error), param=_field_of(str(error)))
        case RequestValidationError():
            problem = first_problem(error.errors())
            return ApiError(400, problem.message, param=problem.field, code=problem.code)
        case EngineClosed():
            return stopped()
        case EngineFailed():
            LOG.error("the engine failed: %s", error)
            return ApiError(503, "the engine has failed; the server's log says why")
        case CommandFailed():
            return ApiError(409, str(error))
        case HTTPException():
            return ApiError(error.status_code, _plain(error), headers=error.headers)
        case _:
            LOG.error("a request failed", exc_info=error)
            return ApiError(500, "an internal error; the server's log has the details")


def _refused(error: RequestRefused) -> ApiError:
    field_name = error.field or None
    match error.kind:
        case "queue_full":
            return ApiError(429, error.message, headers={"Retry-After": str(RETRY_AFTER_S)})
        case "draining":
            return draining()
        case "never_fits":
            return ApiError(400, error.message, param=field_name, code="context_length_exceeded")
        case _:
            return ApiError(400, error.message, param=field_name)


def draining() -> ApiError:
    """The server is about to stop."""
    return ApiError(
        503, "the server is shutting down and takes no new requests", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def stopped() -> ApiError:
    """The server has been told to stop at once, and what runs is cut."""
    return ApiError(
        503, "the server was stopped before the answer was complete", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def _plain(error: HTTPException) -> str:
    """The text of a routing error, in our words."""
    if error.status_code == 404:
        return "there is no such route; /openapi.json lists them"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"the route does not take this method{f'; it takes {allowed}' if allowed else ''}"
    return str(error.detail)


def _field_of(message: str) -> str | None:
    """The field that a message of the form "field: what" starts with."""
    name, colon, _ = message.partition(":")
    return (
        name if colon and name.replace("_", "").replace(".", "").replace("[", "").replace("]", "").isalnum() else None
    )


@dataclass(frozen=True, slots=True)
class Documented:
    """The errors of a route, for its entry in the OpenAPI document."""

    statuses: tuple[int, ...] = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503)
    dialect: Dialect = "openai"
    extra: tuple[int, ...] = field(default=())

    def responses(self) -> dict[int | str, dict[str, object]]:
        """As FastAPI's `responses`."""
        model = AnthropicErrorReply if self.dialect == "anthropic" else ErrorReply
        return {status: {"model": model} for status in sorted({*self.statuses, *self.extra})}
