"""Routes about the server itself: is it able, what does it count, and what an operator may do to it.

Owns health, metrics, information and administration, under the names that tools of other servers use. Knows nothing of prompts
beyond the one-token probe. Mounted by `server.app`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from legato.server.answer.plain import PlainText
from legato.server.api.service import Service, legato_version
from legato.server.generation import Job, new_id
from legato.server.http.errors import ApiError, Documented, ErrorReply
from legato.server.http.sse import json_bytes, unless_disconnected
from legato.server.http.validation import JsonRoute, RequestModel
from legato.types import SamplingParams

PROBE_TIMEOUT_S = 20.0


class Health(TypedDict):
    """Whether requests are served."""

    status: Literal["ready"]


class Alive(TypedDict):
    """The process answers."""

    status: Literal["alive"]


class Version(TypedDict):
    """Of Legato."""

    version: str


class InternalState(TypedDict):
    """Of the engine. Accept length: tokens per decoding iteration of a request since the last flush; null before the first."""

    avg_spec_accept_length: float | None
    last_gen_throughput: float | None
    running: int
    waiting: int


class ServerInfo(TypedDict):
    """What runs here."""

    version: str
    model_path: str
    served_model_name: str
    device: str
    context_length: int
    max_model_len: int
    max_total_num_tokens: int
    max_running_requests: int
    num_drafts: int
    vocab_size: int
    load_seconds: float
    state: str
    internal_states: list[InternalState]


class Flushed(TypedDict):
    """How many pages the prefix cache held."""

    success: bool
    pages: int


class Aborted(TypedDict):
    """How many requests were ended."""

    aborted: int


class Profile(TypedDict):
    """Where the trace is, once it is complete."""

    status: Literal["recording", "written"]
    file: str | None


class AbortRequest(RequestModel):
    """Which requests to end: one or several by the id of their reply, or all."""

    rid: str | Annotated[list[str], Field(max_length=1024)] | None = None
    request_ids: Annotated[list[str], Field(max_length=1024)] | None = None
    abort_all: bool | None = None


def router(service: Service) -> APIRouter:
    """The routes that everyone has."""
    routes = APIRouter(route_class=JsonRoute, tags=["Server"])
    unable: dict[int | str, dict[str, Any]] = {
        503: {"model": ErrorReply, "description": "The engine has failed, or the server is about to stop."}
    }
    errors = Documented((401, 431, 500)).responses()

    async def ready() -> Response:
        """Whether new requests are served: the engine lives and the server is not about to stop."""
        _check_able(service)
        return _json({"status": "ready"})

    for path in ("/health", "/ready", "/readyz", "/v1/health"):
        name = path.strip("/").replace("/", "_")
        routes.add_api_route(path, ready, response_model=Health, responses=unable, operation_id=name)

    @routes.get("/ping", response_model=Alive)
    async def ping() -> Response:
        """Whether the process answers, able or not."""
        return _json({"status": "alive"})

    @routes.get("/health_generate", response_model=Health, responses={**errors, **Documented((429, 503)).responses()})
    async def health_generate(http: Request) -> Response:
        """Whether a token can be generated: one is."""
        _check_able(service)
        await unless_disconnected(http, _probe(service))
        return _json({"status": "ready"})

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={**errors, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), headers={"content-type": service.metrics.CONTENT_TYPE})

    @routes.get("/version", response_model=Version, responses=errors)
    async def version() -> Response:
        """Legato's version."""
        return _json({"version": legato_version()})

    async def server_info() -> Response:
        """What runs here, and the mean accept length since the last flush of the cache."""
        return _json(await _info(service))

    for path in ("/server_info", "/get_server_info"):
        routes.add_api_route(
            path, server_info, response_model=ServerInfo, responses=errors, operation_id=path.strip("/")
        )
    return routes


def operations(service: Service) -> APIRouter:
    """The routes for operators."""
    routes = APIRouter(route_class=JsonRoute, tags=["Operation"])
    errors = Documented((400, 401, 403, 409, 413, 415, 431, 500, 503)).responses()

    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=3600)] = 60.0) -> Response:
        """Empties the prefix cache, and counts accept lengths anew. Running requests go on. `timeout` is not needed and taken."""
        pages = await service.engine.flush_cache()
        await service.engine.reset_stats()
        return _json({"success": True, "pages": pages})

    for path in ("/flush_cache", "/reset_prefix_cache"):
        # One route for both methods, so that a 405 names both; the two below are for the document, which wants a name for each.
        routes.add_api_route(path, flush_cache, methods=["GET", "POST"], include_in_schema=False)
        for method in ("GET", "POST"):
            name = f"{path.strip('/')}_{method.lower()}"
            routes.add_api_route(
                path, flush_cache, methods=[method], response_model=Flushed, responses=errors, operation_id=name
            )

    async def abort_request(request: AbortRequest) -> Response:
        """Ends requests; they finish with the reason `abort`. Ids that are not open are no error."""
        ids = [request.rid] if isinstance(request.rid, str) else [*(request.rid or ()), *(request.request_ids or ())]
        if not ids and not request.abort_all:
            raise ApiError(400, "rid: give the id of a reply, or abort_all: true", param="rid")
        if request.abort_all:
            return _json({"aborted": await service.generations.abort()})
        return _json({"aborted": sum([await service.generations.abort(id) for id in ids])})

    for path in ("/abort_request", "/abort_requests"):
        routes.add_api_route(
            path,
            abort_request,
            methods=["POST"],
            response_model=Aborted,
            responses=errors,
            operation_id=path.strip("/"),
        )

    @routes.post("/start_profile", response_model=Profile, responses=errors)
    async def start_profile() -> Response:
        """Starts recording a trace of the engine into the folder that the server was started with. A body is not read."""
        folder = service.settings.access.profile_folder
        if folder is None:
            raise ApiError(403, "profiling is off: the server was started without a folder for profiles")
        await service.engine.start_profile(folder)
        return _json({"status": "recording", "file": None})

    @routes.post("/stop_profile", response_model=Profile, responses=errors)
    async def stop_profile() -> Response:
        """Ends the recording and writes the trace, a file for Perfetto or chrome://tracing."""
        if service.settings.access.profile_folder is None:
            raise ApiError(403, "profiling is off: the server was started without a folder for profiles")
        path = await service.engine.stop_profile()
        return _json({"status": "written", "file": path.rpartition("/")[2]})

    return routes


def _check_able(service: Service) -> None:
    match service.engine.state:
        case "ready":
            return
        case "draining":
            raise ApiError(503, "the server is about to stop and takes no new requests", code="draining")
        case _:
            raise ApiError(503, "the engine has failed; the server's log says why", code="engine_failed")


async def _probe(service: Service) -> None:
    tokenizer = service.text.tokenizer
    ids = tuple(tokenizer.encode_prompt("1")) or (0,)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    job = Job(new_id("probe"), ids, params, lambda: PlainText(tokenizer), timeout_s=PROBE_TIMEOUT_S)
    answers, _ = await service.generations.complete(job)
    if not answers[0].token_ids:
        raise ApiError(503, f"no token came within {PROBE_TIMEOUT_S:.0f} s", code="no_token")


async def _info(service: Service) -> ServerInfo:
    info, report = service.engine.info, service.engine.last_report
    if service.is_able:
        report = await service.engine.report()
    stats = report.stats
    return {
        "version": legato_version(),
        "model_path": service.model_names[0],
        "served_model_name": service.model_names[0],
        "device": info.device,
        "context_length": info.context,
        "max_model_len": info.context,
        "max_total_num_tokens": info.cache_tokens,
        "max_running_requests": info.max_running,
        "num_drafts": info.num_drafts,
        "vocab_size": info.vocab_size,
        "load_seconds": info.load_seconds,
        "state": service.engine.state,
        "internal_states": [
            {
                "avg_spec_accept_length": _finite(stats.accept_length),
                "last_gen_throughput": _finite(stats.tokens_per_second),
                "running": report.running,
                "waiting": report.waiting,
            }
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _json(reply: object) -> Response:
    return Response(json_bytes(reply), media_type="application/json")
