"""What one user gets against what all users get together, over the number of users and of drafts.

Owns the sweep and the servers that it starts. Times are the load generator's (`legato.bench.load`), accept lengths the server's.
Called by `legato bench pareto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from legato.bench.load.arrivals import ClosedLoop
from legato.bench.load.endpoint import Endpoint
from legato.bench.load.run import Load, Result, run
from legato.bench.load.wire import Wire, WireError
from legato.bench.roofline import Traffic
from legato.config import ConfigError

READY_S = 600.0
STOP_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied: drafts per iteration (none given: the server at `url` stays as it is) and users at a time."""

    num_drafts: tuple[int, ...]
    concurrency: tuple[int, ...]
    sessions_per_user: int = 4

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError("--concurrency must be numbers of at least 1, separated by commas")
        if self.sessions_per_user < 1:
            raise ConfigError(f"--sessions-per-user must be at least 1, got {self.sessions_per_user}")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `num_drafts` is None where the server's own setting was left alone."""

    num_drafts: int | None
    concurrency: int
    result: Result

    @property
    def user_tokens_per_s(self) -> float:
        """What the median user sees once the first token is there."""
        return self.result.summary.user_tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        """What all users get together, prefill and waiting included; NaN where the server counts no tokens."""
        found = self.result.summary.tokens_per_s
        return math.nan if found is None else found

    @property
    def iteration_s(self) -> float:
        """Time of an iteration as the client sees it: accept length by tokens per second of a user. NaN without either."""
        accept = self.result.accept
        return math.nan if accept is None else accept.value / self.user_tokens_per_s


@dataclass(frozen=True, slots=True)
class Bound:
    """A point of the roofline: what memory allows at the accept length that was measured."""

    num_drafts: int
    concurrency: int
    accept_length: float
    user_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all users together, without prefill."""
        return self.concurrency * self.user_tokens_per_s


def bound(traffic: Traffic, bytes_per_s: float, point: Point, context: int) -> Bound | None:
    """The roofline's point for a measured one; `None` where the number of drafts or the accept length is unknown."""
    if point.num_drafts is None or (point.result.accept is None and point.num_drafts):
        return None
    accept = 1.0 if point.result.accept is None else point.result.accept.value
    seconds = traffic.iteration(point.concurrency, point.num_drafts, context) / bytes_per_s
    return Bound(point.num_drafts, point.concurrency, accept, accept / seconds)


def measure(
    endpoint: Endpoint, load: Load, sweep: Sweep, serve_arguments: Sequence[str], watch: Callable[[str], None] = print
) -> Iterator[Point]:
    """Points in order, as they are measured. `endpoint.url` empty: a server of our own is started for each number of drafts,
    with `serve_arguments`.

    Raises:
        ConfigError: a server does not come up, or refuses a request.
    """
    for num_drafts in sweep.num_drafts or (None,):
        with _server(endpoint.url, num_drafts, serve_arguments) as url:
            for concurrency in sweep.concurrency:
                asked = replace(load, arrivals=ClosedLoop(concurrency), sessions=concurrency * sweep.sessions_per_user)
                watch(f"{'' if num_drafts is None else f'K = {num_drafts}, '}{concurrency} at a time")
                yield Point(num_drafts, concurrency, run(replace(endpoint, url=url), asked))


@contextlib.contextmanager
def _server(url: str, num_drafts: int | None, arguments: Sequence[str]) -> Generator[str]:
    if url:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "legato", "serve", "--host", "127.0.0.1", "--port", str(port), *arguments]
    command += [] if num_drafts is None else ["--num-drafts", str(num_drafts)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            asyncio.run(_wait(f"http://127.0.0.1:{port}", process))
            yield f"http://127.0.0.1:{port}"
        except _DiedError as error:
            log.seek(0)
            raise ConfigError(
                f"{' '.join(command[2:])}: {error}; its last words: {log.read()[-600:].strip()}"
            ) from error
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _DiedError(RuntimeError):
    """A server that was started is not there."""


async def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    async with Wire(url, 10.0) as wire:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise _DiedError(f"ended with code {process.returncode} before it was ready")
            with contextlib.suppress(WireError, OSError):
                status, _ = await wire.get("/ready", {})
                if status == 200:
                    return
            await asyncio.sleep(_POLL_S)
    raise _DiedError(f"was not ready after {READY_S:.0f} s")
