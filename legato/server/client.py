"""The server's side of the engine's process: starts it, sends requests, hands out what they gain, and sees when it fails.

Owns the process, the open requests and the watchdog. Runs in one asyncio event loop and imports no torch; knows the engine by
its messages only. Called by the HTTP server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

import legato.engine.messages as messages
from legato.config import Config
from legato.types import SamplingParams

ENGINE = "legato.assembly:assemble"
"""What the process runs, as `module:function`; see `engine.process` for what it must give."""

STALL_S = 60.0
"""A turn may take long (a chunk of a long prompt on a CPU); this much longer than any of them."""

State = Literal["ready", "draining", "failed", "closed"]
RefusalKind = Literal["invalid", "never_fits", "queue_full", "draining"]


class EngineFailed(RuntimeError):
    """The engine cannot go on, or could not start. `error` is the type of what was raised in its process, where that is known."""

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error


class RequestRefused(ValueError):
    """A request that the engine does not take.

    `kind`: "invalid", "never_fits", "queue_full", or "draining" (no new requests: it is about to stop). `field` is the name of
    the field that is wrong, where a single one is, else empty.
    """

    def __init__(self, kind: RefusalKind, field: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.field, self.message = kind, field, message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample of one prompt.

    Attributes:
        prompt: token ids.
        params: how to sample; `n` must be 1, and stop strings are the caller's to find.
        stop_ids: all ids that end it, the checkpoint's and the user's.
        seed: of the sampling noise; `None`: `params.seed`, or a fresh one.
        priority: higher ones run first.
        timeout_s: it ends then with the reason "deadline", wherever it is.
        cache_salt: it shares cached prefixes with requests of the same salt only.
        id: unique among open requests; `None`: one is made.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    id: str | None = None


class EngineClient:
    """An engine in its own process. Make one with `start`, in the event loop that uses it.

    Attributes:
        info: what was started.
        failed: set when the engine has failed; `failure` says why.
    """

    info: messages.EngineInfo
    failed: asyncio.Event

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

        Raises:
            EngineFailed: it could not start; the message is that of the fault.
        """
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Ready, draining (running requests finish, new ones are refused), failed or closed."""
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """Why the engine failed, if it did."""
        raise NotImplementedError

    @property
    def last_report(self) -> messages.Report:
        """The newest report: at most about half a second old while the engine works, a second while it is idle."""
        raise NotImplementedError

    def generate(self, request: GenerationRequest) -> AsyncIterator[messages.Progress]:
        """Yields what the request gains; the last one has a finish reason. Closing the iterator earlier ends the request.

        Raises:
            RequestRefused: it is not taken.
            EngineFailed: the engine failed before the request had ended.
        """
        raise NotImplementedError

    async def abort(self, id: str | None = None) -> None:
        """Ends a request, or all of them: they finish with the reason "abort". Ids that are not open are ignored."""
        raise NotImplementedError

    async def flush_cache(self) -> int:
        """Empties the prefix cache; returns how many pages it held."""
        raise NotImplementedError

    async def reset_stats(self) -> None:
        """Starts `Report.stats` anew; `Report.counters` go on."""
        raise NotImplementedError

    async def report(self) -> messages.Report:
        """A report as of now."""
        raise NotImplementedError

    async def start_profile(self, folder: str) -> None:
        """Starts recording a trace of the engine's process, to be written into `folder`."""
        raise NotImplementedError

    async def stop_profile(self) -> str:
        """Ends the recording; returns the path of the trace, a file that chrome://tracing and Perfetto read."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> int:
        """Takes no new requests and waits for the open ones; returns how many it had to end when the time was up."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the process; what is open fails. Safe to call more than once, and after a failure."""
        raise NotImplementedError
