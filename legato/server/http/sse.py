"""Server-sent events: a reply that is written event by event, kept alive in silence, and given up when the client goes away.

Owns the framing, the keep-alive comments and the watch over the connection, for streams and for whole replies. Knows nothing of
what the events say. The routes return an `EventStream`, or wait for their answer with `unless_disconnected`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from legato.server.http.errors import ApiError, anthropic_reply_of, api_error, dialect_of, reply_of, response_to

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy may hold back or keep what is streamed."""

FIRST_EVENT_S = 2.0
"""How long a stream waits for its first event before it sends its headers: what goes wrong until then has a status of its own."""

TAKEN_S = 30.0
"""How long it waits, on top of that, to hear that the request was taken: the engine takes or refuses requests between two
iterations, however long they last, and a refusal is to have a status."""

DOCUMENTED: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
            "required": ["data"],
        }
    }
}
"""A stream in an OpenAPI document: every event is text with or without a name."""

T = TypeVar("T")
json_bytes = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def event(data: bytes) -> bytes:
    """One event without a name."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, as the Anthropic and Responses APIs have them."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def fault_event(error: ApiError, path: str, request_id: str | None) -> bytes:
    """A fault within a stream, in the dialect of its route."""
    if dialect_of(path) == "anthropic":
        return named_event("error", json_bytes(anthropic_reply_of(error, request_id)))
    body = reply_of(error)
    if path.startswith("/v1/responses"):
        return named_event("error", json_bytes({**body["error"], "type": "error", "sequence_number": 0}))
    return event(json_bytes(body)) + DONE


class EventStream(Response):
    """A reply of events. What goes wrong before the first one is answered with a status of its own.

    Args:
        events: whole events as bytes. It is closed when the client has gone. An empty piece says that the request was taken.
            It may raise until it has given an event; later faults must come as events of the dialect.
        keepalive_s: seconds of silence after which a comment is sent; `None`: never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], keepalive_s: float | None = None) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._keepalive_s = events, keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the events until they end, or until the client is gone."""
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not writing.done():
                writing.cancel()
            await asyncio.wait((writing, watching))
        if not writing.cancelled():
            writing.result()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            taken = asyncio.Event()
            first, told = asyncio.ensure_future(self._first(taken)), asyncio.ensure_future(taken.wait())
            request_id: str | None = scope.get("state", {}).get("request_id")
            try:
                await asyncio.wait((first,), timeout=FIRST_EVENT_S)
                await asyncio.wait((first, told), timeout=TAKEN_S, return_when=asyncio.FIRST_COMPLETED)
                if first.done() and (error := first.exception()) is not None:
                    await response_to(api_error(error), scope["path"], request_id)(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                # Once a reply has begun, the layers in between have nothing to add to it, event by event.
                writer = _Writer(scope.get("state", {}).get("write", send))
                try:
                    await self._write_events(writer, first)
                except Exception as error:
                    # The first event is a fault that came late: the status has been sent, so it has to be told as an event.
                    await writer.write(fault_event(api_error(error), scope["path"], request_id))
            finally:
                first.cancel()
                told.cancel()
                await asyncio.wait((first, told))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first(self, taken: asyncio.Event) -> bytes | None:
        """The first event; sets `taken` at the first sign of life."""
        async for data in self._events:
            taken.set()
            if data:
                return data
        return None

    async def _write_events(self, writer: _Writer, first: asyncio.Future[bytes | None]) -> None:
        pinging = None if self._keepalive_s is None else asyncio.ensure_future(writer.keep_alive(self._keepalive_s))
        try:
            data = await first
            if data is not None:
                await writer.write(data)
            async for data in self._events:
                if data:
                    await writer.write(data)
        finally:
            if pinging is not None:
                pinging.cancel()
                await asyncio.wait((pinging,))


class _Writer:
    """Writes to one connection, and comments into its silences. Each write is whole events, so they may come from two tasks."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._writes = 0

    async def write(self, data: bytes) -> None:
        self._writes += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self, interval_s: float) -> None:
        seen = -1
        while True:
            if self._writes == seen:
                await self.write(KEEP_ALIVE)
            seen = self._writes
            await asyncio.sleep(interval_s)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Waits for `answer`; when the client goes away first it is cancelled. The body of the request must have been read.

    Raises:
        ClientGone: nobody is there to take the answer.
    """
    answering, watching = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not answering.done():
            answering.cancel()
        await asyncio.wait((answering, watching))
    if answering.cancelled():
        raise ClientGone
    return answering.result()
