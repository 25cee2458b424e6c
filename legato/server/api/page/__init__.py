"""The page at `/`: a chat and a live dashboard, plain HTML, CSS and JavaScript from this folder.

Owns these files, the strict policy they are served with, and `/metrics.json`, which the dashboard reads once a second. Nothing
is loaded from elsewhere. Called by `server.app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Response

from legato.server.telemetry.metrics import Metrics

FOLDER = Path(__file__).parent
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The files of the page; no other file of the folder is served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router(metrics: Metrics) -> APIRouter:
    """The routes of the page. `/` and its files hold nothing secret; `/metrics.json` is to be guarded as other routes are."""
    routes = APIRouter()
    contents = {name: (FOLDER / name).read_bytes() for name in TYPES}

    def file(name: str) -> Response:
        return Response(contents[name], media_type=TYPES[name], headers=HEADERS)

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        return file("index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in TYPES:
            raise HTTPException(404)
        return file(name)

    @routes.get(
        "/metrics.json",
        tags=["admin"],
        summary="What the dashboard shows",
        response_model=dict[str, Any],
    )
    async def snapshot() -> Response:
        """Rates, accept lengths by position and phase, load, the last two minutes and the last requests."""
        body = msgspec.json.encode(metrics.snapshot())
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    return routes
