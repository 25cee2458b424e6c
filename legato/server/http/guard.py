"""What stands before every route: an id for the request, keys, and a limit on the body; and behind it, for what nobody expected.

Owns those checks as one ASGI application around another. Knows no route but by its path. Built by `server.app`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.server.http.errors import ApiError, api_error, response_to
from legato.server.settings import Access, RequestLimits

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/readyz", "/v1/health", "/ping"})
OPEN_PREFIX = "/page/"
"""The page itself says nothing; what it shows it asks for with a key."""


class BodyTooLarge(HTTPException):
    """More body than is taken, found while it arrives."""


class Guard:
    """An ASGI application that lets requests through to another one, or answers them itself.

    Args:
        refused: told the kind of every request that is refused here.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: RequestLimits, refused: Callable[[str], None]) -> None:
        self._app, self._limits, self._refused = app, limits, refused
        self._keys = Keys(access.api_keys)
        self._open_paths = OPEN_PATHS if access.guard_metrics else OPEN_PATHS | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the head of what GET brings; the body is left out below this application
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        # `write`: for what follows the start of a reply, which the layers between here and a route only pass on.
        scope.setdefault("state", {}).update({"request_id": request_id, "write": send})
        reply = _Reply(send, request_id)
        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), reply.send)
        except ApiError as error:
            await response_to(error, scope["path"], request_id)(scope, receive, reply.send)
        except Exception as error:
            told = api_error(error)
            if not reply.has_begun:
                await response_to(told, scope["path"], request_id)(scope, receive, reply.send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path: str = scope["path"]
        is_open = path in self._open_paths or path.startswith(OPEN_PREFIX)
        if not is_open and not self._keys.open(headers.get("authorization"), headers.get("x-api-key")):
            self._refused("unauthorized")
            raise ApiError(
                401, "an API key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limits.max_body_bytes:
            self._refused("too_large")
            raise self._too_large(f"{length[:20]} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """The body, counted while it arrives (its length may not have been announced), and its pauses timed."""
        received, is_whole, pause_s = 0, False, self._limits.body_timeout_s

        async def counted() -> Message:
            nonlocal received, is_whole
            try:
                async with asyncio.timeout(None if is_whole else pause_s):
                    message = await receive()
            except TimeoutError:
                said = f"nothing of the body came for {pause_s:g} s, after {received} bytes of it"
                raise HTTPException(408, said, headers={"Connection": "close"}) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if received > self._limits.max_body_bytes:
                    self._refused("too_large")
                    raise BodyTooLarge(413, self._too_large("more").message)
            return message

        return counted

    def _too_large(self, found: str) -> ApiError:
        return ApiError(413, f"the body may have {self._limits.max_body_bytes} bytes, and has {found}")


class Keys:
    """API keys. Each is compared in a time that does not depend on where it differs, and always with all of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def open(self, authorization: str | None, api_key: str | None) -> bool:
        """Whether one of the headers has one of the keys, or there are none."""
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = [_digest(key) for key in (token.strip() if scheme.lower() == "bearer" else "", api_key or "") if key]
        return any([hmac.compare_digest(one, known) for one in given for known in self._digests])  # noqa: C419


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _request_id(given: str | None) -> str:
    """The client's own id where it is harmless in a header and a log, else a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"


class _Reply:
    """Sends a reply with the id of its request, and remembers whether it has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._header = send, (b"x-request-id", request_id.encode())
        self.has_begun = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            message["headers"] = [*message.get("headers", ()), self._header]
        await self._send(message)
