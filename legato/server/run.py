"""From settings to a running server and its end: the socket first, then the engine, then HTTP, and all of it back again.

Owns the order of start and stop, the signals and the port. Knows the engine by its client only. Called by `legato serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from legato.config import Config
from legato.engine.messages import EngineInfo, Loading
from legato.server.api.service import ModelText
from legato.server.app import create_app
from legato.server.engine.client import ENGINE, EngineClient, EngineFailed
from legato.server.http.access_log import AccessLog
from legato.server.http.doorway import Doorway
from legato.server.http.listening import address_of
from legato.server.http.protocol import protocol
from legato.server.settings import SamplingDefaults, ServerSettings
from legato.server.telemetry.meter import Timeline
from legato.server.telemetry.metrics import Metrics
from legato.server.text.tokenizer import Folder

log = logging.getLogger("legato.server")

T = TypeVar("T")

LINGER_S = 3
"""Seconds that open connections get to close once nothing runs any more."""

IDLE_S = 120
"""Seconds that a connection stays open between two requests: longer than clients and proxies keep theirs (httpx 5, nginx and AWS
load balancers 60, Go 90), for whoever closes first must not be the one that does not know of a request under way."""

OPEN_FILES = 65536
"""As many connections may be open, where the system lets a process have them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What is served now, and where; `seconds` from the start of `serve`."""

    info: EngineInfo
    name: str
    url: str
    seconds: float


class Tracing(Protocol):
    """Where finished requests are told: `server.telemetry.tracing`, which needs an extra and is imported by who asks for it."""

    def around(self, application: ASGIApp) -> ASGIApp: ...

    def finished(self, timeline: Timeline) -> None: ...


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end in a loop of the kind that servers are served in: uvloop's, whose turns cost less."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: `serve` below decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves signals alone."""
        yield


async def serve(
    config: Config,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    access_log: bool,
    tracing: Tracing | None = None,
    engine: str = ENGINE,
    on_progress: Callable[[Loading], None],
    on_ready: Callable[[Ready], None],
) -> None:
    """Loads, serves until SIGTERM or SIGINT, lets running requests finish, and ends. A second signal ends at once.

    `engine` names what its process builds, as `server.engine.client` takes it.

    Raises:
        EngineFailed: the engine could not start, or failed while it served.
        TokenizerError, ChatError, SettingsError: the checkpoint's text files cannot be used.
    """
    started = time.monotonic()
    _raise_file_limit()
    doorway = Doorway()
    application: ASGIApp = doorway if tracing is None else tracing.around(doorway)
    http = HttpServer(
        uvicorn.Config(
            AccessLog(application) if access_log else application,
            http=protocol(settings.limits.max_header_bytes, settings.limits.body_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LINGER_S,
            ssl_certfile=settings.listen.certfile,
            ssl_keyfile=settings.listen.keyfile,
        )
    )

    def loading(step: Loading) -> None:
        doorway.loading = step
        on_progress(step)

    with _signals() as stop:
        async with _running(http, sock):
            client = await _unless(stop.first, EngineClient.start(config, on_progress=loading, engine=engine))
            if client is None:
                return
            try:
                files = Folder(Path(client.info.folder))
                settings = replace(settings, defaults=SamplingDefaults.of_checkpoint(files.text))
                text = await asyncio.to_thread(ModelText.open, files)
                metrics = _metrics(client, settings)
                if tracing is not None:
                    metrics.observers.append(tracing.finished)
                app = create_app(client, text, settings, metrics)
                async with app.router.lifespan_context(app):
                    doorway.application = app
                    seconds = time.monotonic() - started
                    metrics.startup = {"load": client.info.load_seconds, "total": seconds}
                    # All that stands now stays: looking through it at every full collection would hold up every stream.
                    gc.collect()
                    gc.freeze()
                    on_ready(Ready(client.info, metrics.model, address_of(settings.listen, sock), seconds))
                    await _until_end(client, stop, settings.drain_s)
            finally:
                await client.close()


def _raise_file_limit() -> None:
    """Every connection is an open file, and where nobody chose a limit it is 1024, beyond which new ones are reset."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _metrics(client: EngineClient, settings: ServerSettings) -> Metrics:
    """The counters of this server, with the engine's gauges."""
    info = client.info
    name = settings.model_names[0] if settings.model_names else info.model
    metrics = Metrics(name, settings.metrics_compat, num_drafts=info.num_drafts, cache_tokens=info.cache_tokens)
    metrics.watch(lambda: client.last_report)
    cache = f"cache {info.cache_tokens} tokens ({info.latent})"
    metrics.about = f"{info.device}, context {info.context}, {cache}, {info.num_drafts} drafts"
    return metrics


async def _until_end(client: EngineClient, stop: Stop, drain_s: float) -> None:
    """Returns once a signal came and running requests have finished; raises `EngineFailed` when the engine fails before."""
    if await _unless(stop.first, client.failed.wait()):
        raise EngineFailed(client.failure or "the engine failed")
    log.info("stopping: running requests get %g s to finish; a second signal cuts them", drain_s)
    ended = await _unless(stop.again, client.drain(drain_s))
    if stop.again.is_set():
        log.warning("stopping at once, at the second signal: %d running requests are cut", client.num_open)
    elif ended:
        log.warning("%d requests were cut short: %g s were not enough for them", ended, drain_s)


@dataclass(frozen=True, slots=True)
class Stop:
    """The wish to end: `first` is set by one signal, `again` by another."""

    first: asyncio.Event
    again: asyncio.Event


@contextlib.contextmanager
def _signals() -> Generator[Stop]:
    """Catches SIGINT and SIGTERM while it is open."""
    loop = asyncio.get_running_loop()
    stop = Stop(asyncio.Event(), asyncio.Event())

    def received() -> None:
        (stop.again if stop.first.is_set() else stop.first).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _running(http: HttpServer, sock: socket.socket) -> AsyncGenerator[None]:
    """HTTP is served while it is open; connections get a moment to close at the end."""
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        yield
    finally:
        http.should_exit = True
        await serving


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or `None`, and `work` cancelled, where `event` is set before."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
