"""HTTP/1.1 on a connection, with limits on what stands before the body: its size, and the time until it is complete.

Owns those limits: uvicorn's own parser has none. Called by `server.run`, which gives the class to uvicorn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.server.http.errors import ApiError, reply_of

LINGER_S = 2.0
"""How long a refused connection stays open, for the client to read why."""


def protocol(max_header_bytes: int, header_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 and closes where request line and headers are longer than `max_header_bytes`, and closes
    where they are not complete `header_timeout_s` after their first byte, or where a connection says nothing for as long as an
    idle one may stay open: those who hold connections open would otherwise take them from everyone."""
    body = msgspec.json.encode(
        reply_of(ApiError(431, f"the request line and headers are longer than {max_header_bytes} bytes"))
    )
    answer = (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )

    class LimitedProtocol(HttpToolsProtocol):
        """Counts what the parser has been given before it knows all headers (one of them may never end), and what they are."""

        _given = _size = 0
        _is_before_body, _is_refused = True, False
        _closing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._close_in(self.timeout_keep_alive)

        def connection_lost(self, exc: Exception | None) -> None:
            self._keep_open()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            if self._is_before_body:
                if not self._given:
                    self._close_in(header_timeout_s)
                self._given += len(data)
            super().data_received(data)
            if self._is_before_body and self._given > max_header_bytes:
                self._refuse()

        def on_url(self, url: bytes) -> None:
            self._size += len(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._size += len(name) + len(value) + len(b": \r\n")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_before_body = False
            self._keep_open()
            if self._size > max_header_bytes:
                self._refuse()
            else:
                super().on_headers_complete()
                if self.scope["http_version"] == "1.0":
                    setattr(self.cycle, "send", _until_closed(self.cycle))  # noqa: B010

        def on_body(self, body: bytes) -> None:
            if not self._is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._is_before_body, self._given, self._size = True, 0, 0
            if not self._is_refused:
                super().on_message_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """Nobody needs to install anything: there is no web socket here, and the request is answered as any other."""

        def _close_in(self, seconds: float) -> None:
            self._keep_open()
            self._closing = self.loop.call_later(seconds, self._close_unless_answering)

        def _close_unless_answering(self) -> None:
            """What comes while an answer is under way may be a line end behind a body, as some clients send it."""
            cycle = cast("RequestResponseCycle | None", self.cycle)  # None until the first request
            if cycle is not None and not cycle.response_complete:
                self._close_in(header_timeout_s)
            else:
                self.transport.close()

        def _keep_open(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None

        def _refuse(self) -> None:
            if not self._is_refused and not self.transport.is_closing():
                self.transport.write(answer)
                # Closed with bytes unread, the connection would be reset, and the answer lost with it.
                if self.transport.can_write_eof():
                    self.transport.write_eof()
                self.loop.call_later(LINGER_S, self.transport.close)
            self._is_refused = True

    return LimitedProtocol


def _until_closed(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """How a reply is sent to a client of HTTP/1.0: it knows no chunks, so one without a length ends with the connection."""
    send = cycle.send

    async def sent(message: Any) -> None:
        cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
        await send(message)

    return sent
