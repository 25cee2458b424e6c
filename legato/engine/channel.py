"""The engine's end of the socket: messages in without waiting, messages out with as much waiting as it takes.

Owns the socket and what is left of an incomplete frame. Knows nothing of what messages mean. Called by `engine.serving` and
`engine.process`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import legato.engine.messages as messages

READ_BYTES = 1 << 20
READS_PER_TURN = 4
"""A flood of messages does not keep the engine from its next turn."""


class Disconnected(ConnectionError):
    """The other side is gone."""


class Channel:
    """The child's end of the socket. Reading waits only as long as it is told to; writing waits for room."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._frames = sock, messages.to_engine()

    def receive(self, timeout_s: float) -> Iterator[messages.ToEngine]:
        """What has come, after at most `timeout_s` if there is nothing yet.

        Raises:
            Disconnected: nothing will come any more.
            MessageError: what has come is no message.
        """
        if timeout_s > 0:
            select.select([self._sock], [], [], timeout_s)
        for _ in range(READS_PER_TURN):
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise Disconnected(str(error)) from error
            if not data:
                raise Disconnected("the connection was closed")
            yield from self._frames.feed(data)

    def send(self, message: messages.FromEngine) -> None:
        """Writes a message. Raises `Disconnected`."""
        rest = memoryview(messages.frame(message))
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                select.select([], [self._sock], [])
            except OSError as error:
                raise Disconnected(str(error)) from error
