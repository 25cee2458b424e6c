"""HTTP/1.1 requests whose replies are timed: asyncio for the bytes, h11 for the protocol.

Owns connections, which are kept for the next request. Exists because a general client takes 4 ms of processor time per request
(httpx 0.28, measured), which would count as the server's; this takes a third. Knows nothing of the API. Called by
`legato.bench.load.endpoint`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from urllib.parse import SplitResult, urlsplit

import h11

_READ_BYTES = 1 << 16
Pieces = AsyncGenerator[tuple[float, bytes], None]
"""Of a body: when each piece was received, and the piece."""


class WireError(RuntimeError):
    """No connection, or what came over it is no HTTP."""


class Wire:
    """Connections to one server. An async context manager: leaving it closes them.

    Args:
        url: `http://` or `https://`, host and port; a path is ignored.
        timeout_s: for one whole request.

    Raises:
        ValueError: the url is of another form.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._parts = _parts(url)
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.close()

    async def get(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Fetches a whole page: its status and body. Raises as `post` does."""
        return await _whole(*await self._request("GET", path, b"", headers))

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Sends a request; returns the status and the whole body. Raises as `post` does."""
        return await _whole(*await self._request("POST", path, body, headers))

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Pieces]:
        """Sends a request; returns the status, and the body piece by piece with the time at which each piece was received.

        The caller reads the body to its end or closes the iterator (`contextlib.aclosing`).

        Raises:
            WireError, TimeoutError, OSError: from here, or from the iterator.
        """
        return await self._request("POST", path, body, headers)

    async def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Pieces]:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        async with asyncio.timeout_at(deadline):
            while True:
                reused = bool(self._idle)
                connection = self._idle.pop() if reused else await _Connection.open(self._parts)
                try:
                    status = await connection.send(method, path, body, headers)
                    break
                except BaseException as error:
                    connection.close()
                    # A kept connection may have been closed by the server meanwhile: ask again on another.
                    if not (reused and isinstance(error, (WireError, OSError))):
                        raise
        return status, self._body(connection, deadline)

    async def _body(self, connection: _Connection, deadline: float) -> Pieces:
        whole = False
        try:
            async with aclosing(connection.body(deadline)) as pieces:
                async for piece in pieces:
                    yield piece
            whole = True
        finally:
            if whole and connection.next_cycle():
                self._idle.append(connection)
            else:
                connection.close()


class _Connection:
    """One connection and where its protocol stands."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._reader, self._writer = host, reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self._received_at = 0.0

    @staticmethod
    async def open(parts: SplitResult) -> _Connection:
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        assert parts.hostname is not None  # `_parts` has looked
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        return _Connection(parts.netloc.rpartition("@")[2], reader, writer)

    async def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        """The request; returns the status of the reply."""
        head = [("host", self._host), ("content-length", str(len(body))), *headers.items()]
        data = self._protocol.send(h11.Request(method=method, target=path, headers=head))
        data = (data or b"") + (self._protocol.send(h11.Data(data=body)) or b"")
        self._writer.write(data + (self._protocol.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event.status_code
            if not isinstance(event, h11.InformationalResponse):
                raise WireError("the server closed the connection without a reply")

    async def body(self, deadline: float) -> Pieces:
        """The reply's body as it comes."""
        while True:
            async with asyncio.timeout_at(deadline):
                event = await self._next()
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise WireError("the connection ended before the reply did")
            yield self._received_at, bytes(event.data)

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                received = await self._reader.read(_READ_BYTES)
                self._received_at = time.perf_counter()
                self._protocol.receive_data(received)
        except h11.RemoteProtocolError as error:
            raise WireError(str(error)) from error
        return event  # pyright: ignore[reportReturnType]  NEED_DATA was handled above

    def next_cycle(self) -> bool:
        """Whether another request may follow on this connection; makes it ready for one."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    def close(self) -> None:
        """Closes it; what is under way is given up."""
        self._writer.close()


async def _whole(status: int, body: Pieces) -> tuple[int, bytes]:
    async with aclosing(body):
        return status, b"".join([piece async for _, piece in body])


def _parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} must look like http://host:port")
    return parts
