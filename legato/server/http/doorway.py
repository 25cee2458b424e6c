"""What answers while the model loads: the port is open from the start, and all but /ping is 503 until the server is ready.

Owns that answer and nothing else. Called by `server.run`, which puts the real application behind it.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.engine.messages import Loading
from legato.server.http.errors import ApiError, body_of

RETRY_SECONDS = 5


class Doorway:
    """An ASGI application that is another one from when `application` is set, and until then says how far loading is."""

    def __init__(self) -> None:
        self.application: ASGIApp | None = None
        self.loading = Loading("starting")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if self.application is not None:
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            await self._meanwhile(scope["path"])(scope, receive, send)

    def _meanwhile(self, path: str) -> Response:
        if path == "/ping":
            return Response(msgspec.json.encode({"status": "alive"}), media_type="application/json")
        stage = self.loading
        error = ApiError(503, f"the model is loading ({stage.stage}); try again in a while", code="loading")
        progress = {"stage": stage.stage, "done": stage.done, "total": stage.total}
        body = {**body_of(error, path), "status": "loading", "loading": progress}
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return Response(msgspec.json.encode(body), 503, headers, "application/json")
