"""A line per HTTP request: what was asked, how it was answered, how long it took; nothing of what was said.

Owns that line and nothing else. Called by `server.run` when it is asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("legato.access")


class AccessLog:
    """An ASGI application that logs what another one answers. Query strings are left out: keys may stand in them."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        start = time.perf_counter()
        seen: dict[str, Any] = {"status": None, "request_id": None}

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                headers: dict[bytes, bytes] = dict(message.get("headers", ()))
                seen["request_id"] = headers.get(b"x-request-id", b"").decode("latin-1") or None
            await send(message)

        try:
            await self._application(scope, receive, watched)
        finally:
            fields = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": seen["status"],
                "ms": round((time.perf_counter() - start) * 1e3, 1),
                "client": scope["client"][0] if scope.get("client") else None,
                "request_id": seen["request_id"],
            }
            log.info("request", extra={"fields": fields})
