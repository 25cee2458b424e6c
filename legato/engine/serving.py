"""The loop of the engine's process: messages become requests, a turn, and progress becomes messages.

Owns what is counted over the life of the process, and when it is reported. Imports no torch; knows neither the process around it
nor what the engine was built from. Called by `engine.process`.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import legato.engine.messages as messages
from legato.config import Config
from legato.engine.channel import Channel
from legato.engine.checking import Checking
from legato.engine.ranks.watch import Watch
from legato.engine.selfcheck import REPLAY
from legato.schedule import NeverFits, Progress, QueueFull, Request, RequestError
from legato.types import ParameterError, Stats

if TYPE_CHECKING:
    from legato.engine.loop import Engine

LOG = logging.getLogger(__name__)

REPORT_S = 0.5
IDLE_REPORT_S = 1.0
STUCK_S = 0.005
"""How long a loop that can do nothing waits for a message before it looks again."""
JUDGED_TURNS = 256
"""Turns that the median is taken over."""


class Profiler(Protocol):
    """Records what the process does. Both raise `RuntimeError` out of order."""

    def start(self, folder: str) -> None: ...

    def stop(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What a process serves: an engine that is warm, what to tell the other side of it, and the watch over its other ranks, if
    it has any."""

    engine: Engine
    info: messages.EngineInfo
    profiler: Profiler
    watch: Watch | None = None


class OnProgress(Protocol):
    """Called while weights load: bytes read so far, bytes in all, and what is being read."""

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None: ...


Assemble = Callable[[Config, OnProgress], Served]
"""What the command line names as `module:function`."""


class Serving:
    """The loop of the process: read what has come, turn, write what was gained. Idle, it sleeps until a message comes."""

    def __init__(self, channel: Channel, served: Served) -> None:
        self._channel, self._engine, self._profiler = channel, served.engine, served.profiler
        self._checking = Checking(self._check)
        self._submitted = 0
        self._refused: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._before_reset: Counter[str] = Counter()
        self._read_at: dict[str, float] = {}
        self._turns: deque[float] = deque(maxlen=JUDGED_TURNS)
        self._reported_at, self._has_worked = -IDLE_REPORT_S, False

    def run(self) -> None:
        """Serves until `Stop` comes. Whatever a turn raises ends it: pages and rows may then hold anything."""
        while True:
            for message in self._channel.receive(self._patience()):
                if isinstance(message, messages.Stop):
                    self._checking.close()
                    return
                self._take(message)
            for request, error in self._checking.done():
                self._admit(request, error)
            if self._engine.has_work:
                self._turn()
            if time.monotonic() >= self._report_due:
                self._report()

    def _patience(self) -> float:
        if self._engine.has_work:
            return STUCK_S if self._engine.is_stuck else 0.0
        if self._checking:
            return STUCK_S
        return max(0.0, self._report_due - time.monotonic())

    @property
    def _report_due(self) -> float:
        return self._reported_at + (REPORT_S if self._has_worked else IDLE_REPORT_S)

    def _turn(self) -> None:
        started, before = time.perf_counter(), self._engine.iterations
        gained = self._engine.turn()
        if self._engine.iterations != before:
            self._turns.append(time.perf_counter() - started)
        self._has_worked = True
        if gained:
            self._channel.send(messages.Gained(tuple(self._told(progress) for progress in gained)))
            self._finished.update(entry.finish_reason for entry in gained if entry.finish_reason is not None)

    def _take(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Submit):
            self._submit(message)
        elif isinstance(message, messages.Abort):
            if self._checking.drop(message.id):
                self._channel.send(messages.Gained((messages.Progress(message.id, (), "abort"),)))
            self._engine.abort(message.id)
        elif isinstance(message, messages.Command):
            self._carry_out(message)
        else:
            raise messages.MessageError(f"{type(message).__name__} came where no such message can come")

    def _submit(self, message: messages.Submit) -> None:
        """Takes a request and says so, or says why not: a client is told "yes" or "no" before its request has run."""
        deadline = None if message.timeout_s is None else time.monotonic() + message.timeout_s
        request = Request(
            id=message.id,
            prompt=message.prompt,
            params=message.params,
            stop_ids=message.stop_ids,
            seed=message.seed,
            num_drafts=message.num_drafts,
            priority=message.priority,
            deadline=deadline,
            cache_salt=message.cache_salt,
        )
        self._read_at[message.id] = time.monotonic()
        grammars, constraint = self._engine.runner.grammars, request.params.constraint
        if constraint is None or (grammars is not None and grammars.knows(constraint)):
            self._admit(request, None)
        else:
            self._checking.begin(request)

    def _admit(self, request: Request, error: BaseException | None) -> None:
        """Takes a request whose grammar, if it has one, was compiled beside the loop; `error`: what came of that."""
        try:
            if error is not None:
                raise error
            self._check(request)
            self._engine.submit(request)
        except (ParameterError, RequestError) as error:
            kind = _refusal(error)
            self._refused[kind] += 1
            self._read_at.pop(request.id, None)
            self._channel.send(messages.Refused(request.id, kind, error.name, str(error)))
        else:
            self._submitted += 1
            self._channel.send(messages.Gained((messages.Progress(request.id, ()),)))

    def _check(self, request: Request) -> None:
        """What fails here has touched nothing yet, and concerns this request alone."""
        if request.id.startswith(REPLAY):
            raise RequestError(f"id: {request.id!r} starts with {REPLAY!r}, as the engine's own requests do", "id")
        try:
            self._engine.runner.check(request.params)
        except ParameterError:
            raise
        except Exception as error:
            LOG.exception("request %s could not be checked", request.id)
            constraint = request.params.constraint
            name = "params" if constraint is None else constraint.kind
            raise ParameterError(name, f"could not be checked ({type(error).__name__}: {error})") from error

    def _carry_out(self, command: messages.Command) -> None:
        value: int | str | None = None
        error = ""
        try:
            if command.kind == "flush_cache":
                value = self._engine.flush_cache()
            elif command.kind == "reset_stats":
                self._before_reset = self._resettable()
                self._engine.reset_stats()
            elif command.kind == "report":
                self._report()
            elif command.kind == "start_profile":
                self._profiler.start(command.argument)
            else:
                value = self._profiler.stop()
        except (OSError, RuntimeError) as fault:
            if command.kind not in ("start_profile", "stop_profile"):
                raise
            LOG.warning("%s: %s", command.kind, fault)
            error = f"{command.kind}: {fault}"
        self._channel.send(messages.Done(command.ticket, value, error))

    def _report(self) -> None:
        gauges, turns = self._engine.gauges, self._turns
        report = messages.Report(
            stats=self._engine.stats,
            counters=self._counters(),
            running=gauges.running,
            waiting=gauges.waiting,
            used_pages=gauges.used_pages,
            free_pages=gauges.free_pages,
            cached_pages=gauges.cached_pages,
            total_pages=gauges.used_pages + gauges.free_pages + gauges.cached_pages,
            iteration_seconds=turns[-1] if turns else 0.0,
            median_iteration_seconds=statistics.median(turns) if turns else 0.0,
        )
        self._channel.send(report)
        self._reported_at, self._has_worked = time.monotonic(), False

    def _counters(self) -> messages.Counters:
        stats = self._engine.stats
        return messages.Counters(
            submitted=self._submitted,
            refused=dict(self._refused),
            finished=dict(self._finished),
            cached_tokens=stats.hit_tokens,
            preemptions=stats.preemptions,
            evicted_pages=stats.evicted_pages,
            **self._resettable(),
        )

    def _told(self, progress: Progress) -> messages.Progress:
        some = progress.prompt_logprobs
        read_at = self._read_at.get(progress.request_id)
        if progress.finish_reason is not None:
            self._read_at.pop(progress.request_id, None)
        return messages.Progress(
            progress.request_id,
            progress.tokens,
            progress.finish_reason,
            progress.accepted,
            progress.drafted,
            progress.cached_tokens,
            progress.logprobs,
            None if some is None else messages.PromptLogprobs(some.start, some.logprobs),
            None if read_at is None or progress.admitted_at is None else max(0.0, progress.admitted_at - read_at),
        )

    def _resettable(self) -> Counter[str]:
        """Those counters of the engine that start anew at a reset, counted on over all resets."""
        return self._before_reset + counted(self._engine.stats)


def counted(stats: Stats) -> Counter[str]:
    """Counters as `Counters` names them, from those of the engine since its last reset."""
    rounds = sum(stats.accepted_at)
    return Counter(
        iterations=stats.iterations,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.emitted_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=sum(accepted * times for accepted, times in enumerate(stats.accepted_at)),
        decode_rounds=rounds,
        checked=stats.checked,
        diverged=stats.diverged,
        collapsed=stats.collapsed,
    )


def _refusal(error: ParameterError | RequestError) -> messages.RefusalKind:
    if isinstance(error, QueueFull):
        return "queue_full"
    return "never_fits" if isinstance(error, NeverFits) else "invalid"
