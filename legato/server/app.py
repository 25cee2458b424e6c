"""The HTTP application: all routes, what stands before them, how faults are told, and the OpenAPI document.

Owns how the parts are put together, and nothing that they do. Called by `server.run`, which owns sockets, signals and the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from legato.server.api import admin, native, page
from legato.server.api.anthropic import reply as anthropic
from legato.server.api.openai import chat_reply, completions, models
from legato.server.api.responses import reply as responses
from legato.server.api.service import ModelText, Service, legato_version
from legato.server.engine.client import CommandFailed, EngineClient, EngineFailed, RequestRefused
from legato.server.http.errors import ApiError, api_error, response_to
from legato.server.http.guard import Guard
from legato.server.http.sse import ClientGone
from legato.server.settings import ServerSettings
from legato.server.telemetry.metrics import Metrics
from legato.server.text.chat_template import ChatError
from legato.types import ParameterError

DESCRIPTION = (
    "Serves GLM with the OpenAI and Anthropic APIs. Every field of a request is honoured exactly or refused by name; `null` is "
    "the same as leaving it out. Errors have one form, `{error: {message, type, param, code}}` (under /v1/messages Anthropic's)."
)
EXPECTED = (ApiError, RequestRefused, ParameterError, ChatError, EngineFailed, CommandFailed, HTTPException)
CLIENT_GONE = 499
NO_REQUEST = (401, 404, 405, 413)
"""Refusals that are counted elsewhere, or that are none: there was no such route or model."""


def create_app(engine: EngineClient, text: ModelText, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """The application around a running engine, which it neither starts nor closes."""
    service = Service.of(engine, text, settings, metrics)
    app = FastAPI(title="Legato", version=legato_version(), docs_url=None, redoc_url=None)
    routers = [part.router(service) for part in (chat_reply, completions, responses, models, anthropic, native, admin)]
    if settings.access.admin_routes:
        routers.append(admin.operations(service))
    for router in (*routers, page.router(metrics)):
        app.include_router(router)
    _add_handlers(
        app, service, {route.path for router in routers for route in router.routes if isinstance(route, Route)}
    )
    app.add_middleware(Guard, access=settings.access, limits=settings.limits, refused=metrics.refused)
    if settings.access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.access.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.openapi = lambda: _document(app, settings)
    return app


def _add_handlers(app: FastAPI, service: Service, routes: Set[str]) -> None:
    def tell(request: Request, error: Exception) -> Response:
        told = api_error(error)
        if isinstance(error, HTTPException) and told.status == 404 and (near := _missed(routes, request.url.path)):
            told.message += (
                f"; did you mean {near}? The base URL of OpenAI's clients ends in /v1, that of Anthropic's does not"
            )
        is_counted = isinstance(error, RequestRefused) or told.status in NO_REQUEST
        if 400 <= told.status < 500 and not is_counted:
            service.metrics.refused("invalid")
        return response_to(told, request.url.path, getattr(request.state, "request_id", None))

    def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (*EXPECTED, RequestValidationError):
        app.add_exception_handler(kind, tell)
    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, gone)


def _missed(routes: Set[str], path: str) -> str | None:
    """The route that a wrong base URL has missed: by a `/v1` too many or too few, or by a slash."""
    end = re.sub(r"^(/v1)+(?=/)", "", re.sub("/+", "/", path))
    return next((near for near in (f"/v1{end}", end) if near in routes), None)


def _document(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document. FastAPI adds an error form to every route that is not ours, and knows nothing of the keys."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        for path, operation in _operations(document):
            operation["responses"].pop("422", None)
            if settings.access.api_keys and path not in ("/", "/health", "/ready", "/readyz", "/v1/health", "/ping"):
                operation["security"] = [{"bearer": []}, {"key": []}]
        components = document.get("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(name, None)
        if settings.access.api_keys:
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        app.openapi_schema = document
    return app.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in cast(dict[str, dict[str, Any]], document["paths"]).items():
        for operation in methods.values():
            yield path, operation
