"""What answers while the model loads: the port is open from the start, and everything is 503 until the server is ready.

Owns that answer and nothing else. Called by `server.run`, which puts the real application behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from legato.engine.messages import Loading

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_SECONDS = 5


class Doorway:
    """An ASGI application that is another one from when `application` is set, and until then says how far loading is."""

    def __init__(self) -> None:
        self.application: Application | None = None
        self.loading = Loading("starting")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if self.application is not None:
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            await self._not_yet(send)

    async def _not_yet(self, send: Send) -> None:
        stage = self.loading
        error = {
            "message": f"the model is loading ({stage.stage}); try again in a while",
            "type": "service_unavailable",
            "param": None,
            "code": "loading",
        }
        progress = {"stage": stage.stage, "done": stage.done, "total": stage.total}
        body = msgspec.json.encode({"error": error, "status": "loading", "loading": progress})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(RETRY_SECONDS).encode()),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
