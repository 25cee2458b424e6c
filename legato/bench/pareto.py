"""What one user gets against what all users get together, over the number of users and of drafts.

Owns the sweep and the servers that it starts. Times are the load generator's (`legato.bench.load`), accept lengths the server's.
Called by `legato bench pareto`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from legato.bench.load.arrivals import ClosedLoop
from legato.bench.load.endpoint import Endpoint
from legato.bench.load.run import Load, Result, run_async
from legato.bench.roofline import Traffic
from legato.bench.served import serving
from legato.config import ConfigError


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


async def measure(
    endpoint: Endpoint, load: Load, sweep: Sweep, serve_arguments: Sequence[str], watch: Callable[[str], None] = print
) -> AsyncGenerator[Point]:
    """Points in order, as they are measured. `endpoint.url` empty: a server of our own is started for each number of drafts,
    with `serve_arguments`.

    Raises:
        ConfigError: a server does not come up, or refuses a request.
    """
    for num_drafts in sweep.num_drafts or (None,):
        async with _server(endpoint.url, num_drafts, serve_arguments) as url:
            for concurrency in sweep.concurrency:
                asked = replace(load, arrivals=ClosedLoop(concurrency), sessions=concurrency * sweep.sessions_per_user)
                watch(f"{'' if num_drafts is None else f'K = {num_drafts}, '}{concurrency} at a time")
                yield Point(num_drafts, concurrency, await run_async(replace(endpoint, url=url), asked))


@contextlib.asynccontextmanager
async def _server(url: str, num_drafts: int | None, arguments: Sequence[str]) -> AsyncGenerator[str]:
    if url:
        yield url
        return
    command = [sys.executable, "-m", "legato", "serve", "--port", "0", "--log-format", "json", *arguments]
    async with serving([*command, *([] if num_drafts is None else ["--num-drafts", str(num_drafts)])]) as served:
        yield served.url
