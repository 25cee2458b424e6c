"""Drives a load: who is asked when, in one event loop, and what came back.

Owns sessions in progress (each turn is sent after the reply before it) and the warm-up. Called by `legato bench serve` and
`legato bench pareto`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from legato.bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop
from legato.bench.load.endpoint import Endpoint, Reply, ask, probe
from legato.bench.load.facts import AcceptLength, accept_length, snapshot, speculates
from legato.bench.load.prompts import Session, Source
from legato.bench.load.statistics import Limits, Summary
from legato.bench.load.wire import Wire
from legato.config import ConfigError


@dataclass(frozen=True, slots=True)
class Load:
    """What to send.

    Attributes:
        source: of the prompts.
        sessions: how many are begun.
        arrivals: when.
        warmup: sessions of one turn that are run before, one at a time, and not counted.
        think_s: between a reply and the next turn of the same session.
        limits: of goodput.
        timeout_s: after which a request counts as failed.
        random_with_speculation: measure random words although the server drafts.
        seed: of the arrivals.
    """

    source: Source
    sessions: int
    arrivals: Arrivals
    warmup: int = 1
    think_s: float = 0.0
    limits: Limits | None = None
    timeout_s: float = 600.0
    random_with_speculation: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ConfigError(f"--sessions must be at least 1, got {self.sessions}")
        if self.warmup < 0:
            raise ConfigError(f"--warmup cannot be negative, got {self.warmup}")
        if not self.timeout_s > 0:
            raise ConfigError(f"--timeout must be above 0 seconds, got {self.timeout_s:g}")


@dataclass(slots=True)
class Progress:
    """How far a run is, while it runs."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: every reply in the order of its scheduled time, the figures, and what the server said of its drafts."""

    endpoint: Endpoint
    load: Load
    replies: tuple[Reply, ...]
    summary: Summary
    accept: AcceptLength | None


def run(endpoint: Endpoint, load: Load, watch: Callable[[Progress], None] = lambda _: None) -> Result:
    """Runs a load to its end; `watch` is called whenever something was sent or came back.

    Raises:
        ConfigError: no server answers, it refuses a first request, or random words would be measured with speculation.
    """
    return asyncio.run(run_async(endpoint, load, watch))


async def run_async(endpoint: Endpoint, load: Load, watch: Callable[[Progress], None] = lambda _: None) -> Result:
    """`run`, inside an event loop."""
    sessions = load.source.sessions(load.sessions + load.warmup)
    try:
        wire = Wire(endpoint.root, load.timeout_s)
    except ValueError as error:
        raise ConfigError(f"the server's address {error}") from error
    async with wire:
        endpoint = await probe(wire, endpoint)
        for session in sessions[load.sessions :]:
            await ask(wire, endpoint, _messages(session), time.perf_counter())
        before = await snapshot(wire, endpoint)
        _refuse_noise(load, speculates(before))
        driver = _Driver(wire, endpoint, load, watch)
        await driver.drive(sessions[: load.sessions])
        accept = accept_length(before, await snapshot(wire, endpoint))
    replies = tuple(sorted(driver.replies, key=lambda reply: reply.scheduled))
    return Result(endpoint, load, replies, Summary.of(replies, load.limits), accept)


def _refuse_noise(load: Load, drafts: bool) -> None:
    if load.source.is_random and drafts and not load.random_with_speculation:
        raise ConfigError(
            "--prompts random: this server drafts, and accept lengths over random words say nothing about real text (published "
            "figures differ by a factor of 1.7 because of it). Use --prompts held-out, or say --random-with-speculation"
        )


def _messages(session: Session) -> list[dict[str, str]]:
    """The conversation up to its first turn."""
    opening = [] if session.system is None else [{"role": "system", "content": session.system}]
    return [*opening, {"role": "user", "content": session.turns[0]}]


class _Driver:
    """One run: sends turns, collects replies."""

    def __init__(self, wire: Wire, endpoint: Endpoint, load: Load, watch: Callable[[Progress], None]) -> None:
        self._wire, self._endpoint, self._load, self._watch = wire, endpoint, load, watch
        self._progress = Progress()
        self.replies: list[Reply] = []

    async def drive(self, sessions: Sequence[Session]) -> None:
        arrivals = self._load.arrivals
        if isinstance(arrivals, OpenLoop):
            await self._open(sessions, arrivals.times(len(sessions), self._load.seed))
        else:
            await self._closed(sessions, arrivals)

    async def _open(self, sessions: Sequence[Session], times: Sequence[float]) -> None:
        start = time.perf_counter()
        running: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for number, (session, at) in enumerate(zip(sessions, times, strict=True)):
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                running.append(group.create_task(self._session(number, session, start + at)))

    async def _closed(self, sessions: Sequence[Session], arrivals: ClosedLoop) -> None:
        waiting = iter(enumerate(sessions))

        async def user() -> None:
            for number, session in waiting:
                await self._session(number, session, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(arrivals.concurrency, len(sessions))):
                group.create_task(user())

    async def _session(self, number: int, session: Session, scheduled: float) -> None:
        """Turn after turn. A failed turn ends the session: what follows would be another conversation."""
        messages = _messages(session)
        for turn, _ in enumerate(session.turns):
            if turn:
                await asyncio.sleep(self._load.think_s)
                scheduled = time.perf_counter()
                messages.append({"role": "user", "content": session.turns[turn]})
            self._progress.sent += 1
            self._watch(self._progress)
            reply = await ask(self._wire, self._endpoint, messages, scheduled)
            self.replies.append(replace(reply, session=number, turn=turn))
            self._progress.done += 1
            self._progress.failed += reply.error is not None
            self._progress.tokens += reply.completion_tokens or 0
            self._watch(self._progress)
            if reply.error is not None:
                return
            messages.append({"role": "assistant", "content": reply.text})
