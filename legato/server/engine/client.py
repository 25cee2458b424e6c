"""The server's side of the engine's process: starts it, sends requests, hands out what they gain, and sees when it fails.

Owns the connection, the open requests and what the engine's state is. Runs in one asyncio event loop and imports no torch; knows
the engine by its messages only. Called by the HTTP server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Literal

import legato.engine.messages as messages
from legato.config import Config
from legato.server.engine.child import Child
from legato.server.engine.submission import GenerationRequest, RefusalKind, RequestRefused, framed
from legato.server.engine.watchdog import Watchdog
from legato.types import Stats

__all__ = [
    "CommandFailed",
    "EngineClient",
    "EngineClosed",
    "EngineFailed",
    "GenerationRequest",
    "RefusalKind",
    "RequestRefused",
    "State",
]

LOG = logging.getLogger(__name__)

ENGINE = "legato.assembly:assemble"
"""What the process builds, as `module:function`; see `engine.serving.Assemble`."""

STALL_S = 60.0
"""A turn may take long (a chunk of a long prompt on a CPU); this is much longer than any of them."""
CLOSE_S = 10.0
"""From being told to stop to being killed."""
GRACE_S = 1.0
"""From the first sign of an end (the exit, or the closed connection) to the other one."""

State = Literal["ready", "draining", "failed", "closed"]


class EngineFailed(RuntimeError):
    """The engine cannot go on, or could not start. `error` is the type of what was raised in its process, where that is known."""

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error

    def again(self) -> EngineFailed:
        """The same failure for one more to raise: an exception that is raised twice collects both tracebacks."""
        return type(self)(str(self), self.error)


class EngineClosed(EngineFailed):
    """The engine was told to end, and nothing is wrong with it."""


class CommandFailed(RuntimeError):
    """The engine could not do what it was told, and goes on."""


class EngineClient:
    """An engine in its own process. Make one with `start`, and use it in that event loop only.

    Attributes:
        info: what was started.
        failed: set when the engine has failed; `failure` says why.
    """

    info: messages.EngineInfo

    def __init__(self, child: Child, stall_s: float, on_progress: Callable[[messages.Loading], None] | None) -> None:
        self.failed = asyncio.Event()
        self._child, self._on_progress = child, on_progress
        self._watchdog = Watchdog(stall_s)
        self._state: State = "ready"
        self._failure: EngineFailed | None = None
        self._has_started = False
        self._ready: asyncio.Future[messages.EngineInfo] = asyncio.get_running_loop().create_future()
        self._disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open: dict[str, asyncio.Queue[messages.Progress | Exception]] = {}
        # Neither taken nor refused by the engine yet: their grammars are being compiled.
        self._untaken: set[str] = set()
        self._leaving: set[str] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._tickets: dict[int, asyncio.Future[int | str | None]] = {}
        self._numbers = itertools.count(1)
        self._report: messages.Report | None = None
        self._transport: asyncio.Transport | None = None
        self._overseer: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        on_progress: Callable[[messages.Loading], None] | None = None,
        stall_s: float = STALL_S,
        engine: str = ENGINE,
    ) -> EngineClient:
        """Starts the process and waits until it is ready, however long loading takes.

        Args:
            config: what to start.
            on_progress: called while it loads.
            stall_s: the engine has failed when it is silent, or brings no open request any further, for so long.
            engine: what the process builds, as `module:function`.

        Raises:
            EngineFailed: it could not start; the message is that of the fault.
        """
        try:
            first = messages.frame(messages.Start(config, LOG.getEffectiveLevel()))
            child = Child.spawn(engine)
        except (messages.MessageError, OSError) as error:
            raise EngineFailed(f"the engine's process cannot be started: {error}", type(error).__name__) from error
        client = cls(child, stall_s, on_progress)
        try:
            await client._connect(first)
            client.info = await client._ready
            client._has_started = True
        except BaseException:
            await client.close()
            raise
        client._watchdog.begin()
        return client

    @property
    def state(self) -> State:
        """Ready, draining (running requests finish, new ones are refused), failed or closed."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the engine failed, if it did."""
        return None if self._failure is None else str(self._failure)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._child.pid

    @property
    def last_report(self) -> messages.Report:
        """The newest report: at most about half a second old while the engine works, a second while it is idle."""
        return self._report or messages.Report(Stats(), messages.Counters())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[messages.Progress, None]:
        """Yields what the request gains; the last one has a finish reason. Closing the iterator earlier ends the request.

        It is sent when the first item is asked for. Where a loop may leave early, `contextlib.aclosing` closes in time.

        Raises:
            RequestRefused: it is not taken.
            EngineFailed: the engine failed before the request had ended.
        """
        gains = self._submit(request_id := request.id or f"request-{next(self._numbers)}", request)
        try:
            while True:
                gained = await gains.get()
                if isinstance(gained, Exception):
                    raise gained
                yield gained
                if gained.finish_reason is not None:
                    return
        finally:
            if self._open.get(request_id) is gains:
                self._leaving.add(request_id)
                self._close_request(request_id)
                self._send(messages.Abort(request_id))

    async def abort(self, id: str | None = None) -> None:
        """Ends a request, or all of them: they finish with the reason "abort". Ids that are not open are ignored."""
        for request_id in list(self._open) if id is None else [id]:
            if request_id in self._open:
                self._send(messages.Abort(request_id))

    async def flush_cache(self) -> int:
        """Empties the prefix cache; returns how many pages it held."""
        return int(await self._command("flush_cache") or 0)

    async def reset_stats(self) -> None:
        """Starts `Report.stats` anew; `Report.counters` go on."""
        await self._command("reset_stats")

    async def report(self) -> messages.Report:
        """A report as of now."""
        await self._command("report")
        return self.last_report

    async def start_profile(self, folder: str) -> None:
        """Starts recording a trace of the engine's process, to be written into `folder`.

        Raises:
            CommandFailed: one is being recorded already, or the folder cannot be written to.
        """
        await self._command("start_profile", folder)

    async def stop_profile(self) -> str:
        """Ends the recording; returns the path of the trace, a file that chrome://tracing and Perfetto read.

        The engine does nothing else while it writes the file. Raises `CommandFailed` when nothing is being recorded.
        """
        return str(await self._command("stop_profile"))

    async def drain(self, timeout_s: float) -> int:
        """Takes no new requests and waits for the open ones; returns how many it had to end when the time was up."""
        if self._state == "ready":
            self._state = "draining"
        if await self._is_quiet_within(timeout_s):
            return 0
        cut = len(self._open)
        await self.abort()
        await self._is_quiet_within(GRACE_S)
        return cut

    async def close(self) -> None:
        """Ends the process; what is open fails. Safe to call more than once, and after a failure."""
        if self._state in ("ready", "draining"):
            self._state = "closed"
            self._give_up(EngineClosed("the engine was closed"))
            self._send(messages.Stop())
        if self._failure is not None:
            await self._child.wait(GRACE_S)
        else:
            await self._child.wait(CLOSE_S if self._has_started else 0.0)
        if self._overseer is not None:
            await self._overseer
        if self._transport is not None:
            self._transport.close()

    async def _connect(self, first: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Connection(self), sock=self._child.sock)
        self._transport.write(first)
        self._overseer = loop.create_task(self._oversee())

    async def _is_quiet_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._quiet.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _submit(self, request_id: str, request: GenerationRequest) -> asyncio.Queue[messages.Progress | Exception]:
        if self._state == "draining":
            raise RequestRefused("draining", "", "the engine is about to stop and takes no new requests")
        self._check_alive()
        if request_id in self._open or request_id in self._leaving:
            raise RequestRefused("invalid", "id", f"id: {request_id!r} is in use by another request")
        frame = framed(request_id, request, self.info.vocab_size)
        if not self._open:
            self._watchdog.moved()
            self._quiet.clear()
        self._open[request_id] = gains = asyncio.Queue()
        self._untaken.add(request_id)
        self._write(frame)
        return gains

    def _close_request(self, request_id: str) -> asyncio.Queue[messages.Progress | Exception] | None:
        gains = self._open.pop(request_id, None)
        self._untaken.discard(request_id)
        if not self._open:
            self._quiet.set()
        return gains

    async def _command(self, kind: messages.CommandKind, argument: str = "") -> int | str | None:
        self._check_alive()
        ticket = next(self._numbers)
        self._tickets[ticket] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.Command(ticket, kind, argument))
            return await answer
        finally:
            self._tickets.pop(ticket, None)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.again()
        if self._state == "closed":
            raise EngineClosed("the engine was closed")

    def _send(self, message: messages.ToEngine) -> None:
        self._write(messages.frame(message))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def take(self, message: messages.FromEngine) -> None:
        """A message has come (called by the connection)."""
        self._watchdog.heard()
        if isinstance(message, messages.Gained):
            self._watchdog.moved()
            for progress in message.progress:
                self._pass_on(progress.request_id, progress, progress.finish_reason is not None)
        elif isinstance(message, messages.Report):
            if self._report is None or message.counters.iterations != self._report.counters.iterations:
                self._watchdog.moved()
            self._report = message
        elif isinstance(message, messages.Refused):
            refusal = RequestRefused(message.kind, message.field, message.message)
            self._pass_on(message.id, refusal, is_last=True)
        elif isinstance(message, messages.Done):
            self._answer(message)
        elif isinstance(message, messages.Loading):
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, messages.Ready):
            if not self._ready.done():
                self._ready.set_result(message.info)
        else:
            self._fail(EngineFailed(message.reason, message.error))

    def broken(self, reason: str) -> None:
        """What comes is no message (called by the connection)."""
        self._fail(EngineFailed(f"the engine's process does not speak the protocol: {reason}"))
        self._child.kill()

    def disconnected(self) -> None:
        """Nothing will come any more (called by the connection)."""
        if not self._disconnected.done():
            self._disconnected.set_result(None)

    def _pass_on(self, request_id: str, gained: messages.Progress | Exception, is_last: bool) -> None:
        gains = self._open.get(request_id)
        self._untaken.discard(request_id)
        if is_last:
            self._close_request(request_id)
            self._leaving.discard(request_id)
        if gains is not None:
            gains.put_nowait(gained)

    def _answer(self, done: messages.Done) -> None:
        answer = self._tickets.pop(done.ticket, None)
        if answer is None or answer.done():
            return
        if done.error:
            answer.set_exception(CommandFailed(done.error))
        else:
            answer.set_result(done.value)

    async def _oversee(self) -> None:
        """Until the process has ended: looks for silence, and makes sure that an end is an end."""
        ends = [self._child.exited, self._disconnected]
        while not any(end.done() for end in ends) and self._failure is None:
            await asyncio.wait(ends, timeout=self._watchdog.period_s, return_when=asyncio.FIRST_COMPLETED)
            fault = self._watchdog.fault(len(self._open.keys() - self._untaken))
            if fault is not None and self._state != "closed":
                self._fail(EngineFailed(fault))
                self._child.kill()
        # What it last said may still be on its way when it ends, and its exit code when it falls silent.
        await asyncio.wait(ends, timeout=GRACE_S)
        self._fail(EngineFailed(f"the engine's process {self._child.ending()}"))
        await self._child.wait(0.0)

    def _fail(self, failure: EngineFailed) -> None:
        """The first failure counts. What follows from closing is none."""
        if self._failure is None and self._state != "closed":
            self._failure, self._state = failure, "failed"
            if self._has_started:  # else whoever starts it is told, and says so
                LOG.error("the engine failed: %s", failure)
            self.failed.set()
        self._give_up(failure)

    def _give_up(self, failure: EngineFailed) -> None:
        """Everyone who waits for the engine is told."""
        for request_id in list(self._open):
            self._pass_on(request_id, failure.again(), is_last=True)
        self._leaving.clear()
        for answer in [*self._tickets.values(), self._ready]:
            if not answer.done():
                answer.set_exception(failure.again())
        if not self._ready.cancelled():
            self._ready.exception()  # nobody may be waiting for it


class _Connection(asyncio.Protocol):
    """Bytes from the engine, cut into messages."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._frames = client, messages.from_engine()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._client.take(message)
        except messages.MessageError as error:
            self._client.broken(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.disconnected()
