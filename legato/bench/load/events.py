"""Server-sent events as they come: one reader for the load, the soak and the checks of a server.

Owns the framing. Knows no API: what an event says is its caller's business. Called by `legato.bench.load.endpoint`,
`legato.bench.soak_http.clients` and `legato.validate.target`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from legato.bench.load.wire import Pieces


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """An event with data: when its last byte was received (`time.perf_counter`), its name (empty without one), its data."""

    at: float
    name: str
    data: bytes


class EventReader:
    """Reads one body. `rest`: what came behind the last whole event; a sound server leaves nothing there."""

    def __init__(self, body: Pieces) -> None:
        self._body = body
        self.rest = b""

    async def events(self) -> AsyncGenerator[ServerEvent]:
        """The events that carry data, as they come; comments are passed over. Raises as the body does."""
        async for at, received in self._body:
            *blocks, self.rest = (self.rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                lines = block.split(b"\n")
                data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                if data:
                    names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
                    yield ServerEvent(at, names[-1].decode("utf-8", "replace") if names else "", b"\n".join(data))
