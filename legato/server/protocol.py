"""HTTP/1.1 on a connection, with a limit on what stands before the body.

Owns that limit: uvicorn's own parser has none. Called by `server.run`, which gives the class to uvicorn.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.server.errors import ApiError, reply_of

LINGER_S = 2.0
"""How long a refused connection stays open, for the client to read why."""


def protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 and closes where request line and headers are longer than `max_header_bytes`."""
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

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            if self._is_before_body:
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
