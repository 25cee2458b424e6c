"""One turn of the engine: plan, launch, settle the previous flight while this one runs.

Owns nothing but the flight in the air. The scheduler decides, the runner computes; with `overlap` off the same loop settles one
turn earlier. Called by `legato.llm` (and by a serving process).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from legato.engine.selfcheck import AcceptMonitor, SelfCheck
from legato.plan import Outcome, Plan
from legato.schedule import Progress, Request, RequestError, Scheduler
from legato.types import SamplingParams, Stats

if TYPE_CHECKING:  # the loop itself needs no tensor, nor does a runner that is a stand-in
    from legato.runtime.grammar import Grammars


class Launched(Protocol):
    """A plan in the air. `outcome()` waits for what it brings."""

    @property
    def plan(self) -> Plan: ...

    def outcome(self) -> Outcome: ...


class Launcher(Protocol):
    """What carries plans out: `legato.runtime.runner.Runner`, or a stand-in that needs no model.

    `check` raises `ParameterError` for what could not be carried out. `grammars` are set before a request needs one.
    """

    grammars: Grammars | None

    def check(self, params: SamplingParams) -> None: ...

    def launch(self, plan: Plan) -> Launched: ...


@dataclass(frozen=True, slots=True)
class Gauges:
    """How full the engine is now. Pages that running requests hold alone, or that are in quarantine, are used; `cached_pages` are
    those of the prefix cache, shared by running requests or not. The three kinds are all the pages there are. Rows are used until
    the last iteration that may touch them has come back."""

    running: int
    waiting: int
    used_pages: int
    free_pages: int
    cached_pages: int
    used_rows: int


class Engine:
    """Requests in, progress out. Not thread-safe: one caller submits, aborts and turns.

    Attributes:
        is_stuck: the last turn neither launched nor settled anything; only a message or the time can change that.
    """

    def __init__(self, scheduler: Scheduler, runner: Launcher, overlap: bool, check: SelfCheck | None = None) -> None:
        self._check, self._monitor = check or SelfCheck(0.0), AcceptMonitor()
        self._scheduler, self.runner, self._overlap = scheduler, runner, overlap
        self._flight: Launched | None = None
        self._landed_at: float | None = None
        self._stats = Stats(accepted_at=(0,) * (scheduler.limits.num_drafts + 1))

    @property
    def has_work(self) -> bool:
        """Whether another turn would bring anything."""
        return self._scheduler.has_work or self._flight is not None

    @property
    def iterations(self) -> int:
        """Iterations settled since the start or the last reset."""
        return self._stats.iterations

    @property
    def gauges(self) -> Gauges:
        """Requests and pages as they are now."""
        scheduler, pages = self._scheduler, self._scheduler.pages
        free, cached = pages.pool.num_free, pages.num_cached
        used = pages.capacity - free - cached
        rows = scheduler.rows.capacity - scheduler.rows.num_free
        return Gauges(scheduler.num_running, scheduler.num_waiting, used, free, cached, rows)

    @property
    def stats(self) -> Stats:
        """Counters since the start or the last reset; those of the prefix cache and of preemption are never reset."""
        pages = self._scheduler.pages
        return replace(
            self._stats,
            hit_tokens=pages.counters.hit_tokens,
            cached_pages=pages.num_cached,
            evicted_pages=pages.counters.evicted_pages,
            host_hit_tokens=pages.counters.host_hit_tokens,
            host_pages=pages.num_on_host,
            host_evicted_pages=pages.tree.num_dropped,
            preemptions=self._scheduler.num_preemptions,
            checked=self._check.checked,
            diverged=self._check.diverged,
            first_divergence=self._check.first,
            collapsed=self._monitor.collapsed,
        )

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: it can never run here.
            ParameterError: its parameters name ids that do not exist, or a grammar that cannot be compiled.
        """
        self.runner.check(request.params)
        self._scheduler.add(request)
        self._check.watch(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at the next turn; unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def preempt(self, request_id: str) -> None:
        """Sends a running request back to wait; it resumes with the same text."""
        self._scheduler.preempt(request_id)

    def flush_cache(self) -> int:
        """Empties the prefix cache; returns how many pages it held."""
        return self._scheduler.flush_cache()

    def turn(self) -> list[Progress]:
        """One turn. Returns what requests gained, at most one turn late."""
        started = time.perf_counter()
        plan = self._scheduler.plan(time.monotonic())
        launched = None if plan.is_empty else self.runner.launch(plan)
        progress = self._scheduler.take_ended()
        self.is_stuck = launched is None and self._flight is None
        landing = [self._flight] if self._overlap else [self._flight, launched]
        self._flight = launched if self._overlap else None
        for flight in landing:
            if flight is not None:
                outcome = flight.outcome()
                gained = self._scheduler.settle(outcome, self._took(outcome, started))
                self._count(flight.plan, outcome, gained, started)
                progress += gained
        if not any(landing):
            self._landed_at = None
        self._monitor.take(progress)
        progress, replays = self._check.take(progress)
        for replay in replays:
            self._replay(replay)
        return progress

    def _took(self, outcome: Outcome, started: float) -> float | None:
        """Seconds between the ends of the last two iterations, where the device had the second one to go on with when the first
        ended, and said when it was done."""
        now = time.perf_counter()
        before = self._landed_at if self._overlap else started
        self._landed_at = now if outcome.emissions else None
        if before is None or not outcome.emissions:
            return None
        # The host may come late to a letter, because it is launching a prompt; the device's clock knows nothing of that.
        return outcome.seconds if self._overlap and outcome.seconds is not None else now - before

    def reset_stats(self) -> None:
        """Starts the counters anew."""
        self._stats = Stats(accepted_at=(0,) * (self._scheduler.limits.num_drafts + 1))
        self._check.reset()
        self._monitor.collapsed = 0

    def _replay(self, request: Request) -> None:
        """A replay that the scheduler refuses is given up: checks never get in the way of requests."""
        try:
            self._scheduler.add(request)
        except RequestError:
            self._check.forget(request)

    def _count(self, plan: Plan, outcome: Outcome, gained: list[Progress], started: float) -> None:
        """Decode time is the time of turns that decode and extend nothing: speed is never mixed with prefill.

        Tokens count when a request gains them: what a preempted one samples again counts once.
        """
        stats, decodes = self._stats, set(plan.decodes)
        accepted, drafts = list(stats.accepted_at), self._scheduler.limits.num_drafts
        emitted, drafted = sum(len(progress.tokens) for progress in gained), 0
        ran = plan.extends if self._scheduler.is_whole(plan) else ()
        pure = bool(decodes) and not plan.extends
        for emission in outcome.emissions:
            if emission.row in decodes and emission.tokens:
                drafted += emission.drafted
                if drafts and emission.is_plain:
                    pure = False  # a replay decodes plainly: it says nothing about speed or accept length
                else:
                    accepted[emission.accepted] += 1
        self._stats = replace(
            stats,
            iterations=stats.iterations + 1,
            prompt_tokens=stats.prompt_tokens + sum(len(extend.tokens) for extend in ran),
            emitted_tokens=stats.emitted_tokens + emitted,
            decoded_tokens=stats.decoded_tokens + (emitted if pure else 0),
            decode_seconds=stats.decode_seconds + (time.perf_counter() - started if pure else 0.0),
            accepted_at=tuple(accepted),
            drafted_tokens=stats.drafted_tokens + drafted,
        )
