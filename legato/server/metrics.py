"""What the server counts about requests, tokens and drafts, for `/metrics` and the page.

Owns the counters and what each of them means; `server.exposition` gives them their Prometheus names. Must not know HTTP. Called
by `server.generation` (a meter per engine request), `server.admin` (`render`) and `server.page` (`snapshot`), in the event loop.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

from prometheus_client import CONTENT_TYPE_LATEST

from legato.engine.messages import Report
from legato.server.exposition import Dialect, Exposition, cache_usage
from legato.server.tally import Histogram, Window

Phase = Literal["reasoning", "content", "tool_call"]
"""Which part of an answer a token belongs to."""

Ending = Literal["stop", "length", "tool_calls", "abort", "deadline", "error"]
"""How a request ended: the engine's finish reasons, `tool_calls`, and `error` for a fault of ours."""

Refusal = Literal["invalid", "never_fits", "queue_full", "unauthorized", "too_large", "draining", "other"]
"""Why a request never reached the engine."""

PHASES, ENDINGS, REFUSALS = get_args(Phase), get_args(Ending), get_args(Refusal)

LATENCY_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 320.0, 640.0, 1280.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_BOUNDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LENGTH_BOUNDS = tuple(float(2**power) for power in range(0, 21, 1))
ACCEPT_BOUNDS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0)
HISTORY_SECONDS = 120
RECENT_SECONDS = 10
RECENT_REQUESTS = 20


@dataclass(slots=True)
class PhaseTally:
    """Tokens and drafts of one phase. A round is an iteration of one request that verified at least one draft."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens per round: one of the model's own, and the accepted drafts. `None` before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what happened to one request, in seconds of the monotonic clock; `first` is `None` without a token, `admitted` where
    the engine does not say."""

    model: str
    started: float
    admitted: float | None
    first: float | None
    last: float
    ended: float
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    accept_length: float | None

    def parts(self) -> list[tuple[str, float, float]]:
        """Name, start and end of each phase that is known: queue, prefill, decode."""
        found: list[tuple[str, float, float]] = []
        if self.admitted is not None:
            found.append(("queue", self.started, self.admitted))
            if self.first is not None:
                found.append(("prefill", self.admitted, max(self.admitted, self.first)))
        if self.first is not None:
            found.append(("decode", self.first, self.last))
        return found


class Metrics:
    """All counters of a server. Counters never fall; gauges are read from the engine's last report when they are asked for.

    Args:
        model: the served model's name, the only label value that is not from a fixed list.
        compat: whose metric names are emitted besides `legato_*`: "vllm", "sglang".
        num_drafts: K; how many draft positions are counted.
        cache_tokens: capacity of the cache over all requests.
        clock: seconds of a monotonic clock.

    `startup` (seconds by phase: "load", "total") and `about` (a line for people) are filled in when the engine is ready. The
    `observers` are told of every request that has ended.
    """

    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(
        self,
        model: str,
        compat: Collection[Dialect] = (),
        *,
        num_drafts: int = 7,
        cache_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.num_drafts = num_drafts
        self.cache_tokens = cache_tokens
        self.clock = clock
        self.started_at = clock()
        self.running_meters = 0
        self.phases: dict[str, PhaseTally] = {phase: PhaseTally() for phase in PHASES}
        self.drafted_at = [0] * num_drafts
        self.accepted_at = [0] * num_drafts
        self.endings: Counter[str] = Counter(dict.fromkeys(ENDINGS, 0))
        self.refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.reasoning_tokens = 0
        self.startup: dict[str, float] = {}
        self.about = ""
        self.ttft = Histogram(LATENCY_BOUNDS)
        self.inter_token = Histogram(TOKEN_TIME_BOUNDS)
        self.time_per_output_token = Histogram(TOKEN_TIME_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.inference_time = Histogram(LATENCY_BOUNDS)
        self.prompt_length = Histogram(LENGTH_BOUNDS)
        self.output_length = Histogram(LENGTH_BOUNDS)
        self.request_accept_length = Histogram(ACCEPT_BOUNDS)
        self.window = Window(HISTORY_SECONDS, num_drafts)
        self.recent_requests: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        self.observers: list[Callable[[Timeline], None]] = []
        self._report: Callable[[], Report | None] = lambda: None
        self._exposition = Exposition(self, compat)

    @property
    def report(self) -> Report | None:
        """The engine's own numbers, as of its last report; `None` before the first."""
        return self._report()

    @property
    def rounds(self) -> int:
        return sum(tally.rounds for tally in self.phases.values())

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per round since the start; `None` before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    def watch(self, report: Callable[[], Report | None]) -> None:
        """Takes the gauges from `report` whenever they are asked for."""
        self._report = report

    def request_started(self) -> RequestMeter:
        """A meter for one request to the engine (each of `n` choices has its own), running from now on."""
        self.running_meters += 1
        return RequestMeter(self)

    def refused(self, kind: str) -> None:
        """Counts a request that was refused before it reached the engine; kinds outside `Refusal` count as "other"."""
        self.refusals[kind if kind in self.refusals else "other"] += 1

    def render(self) -> bytes:
        """The Prometheus text of everything."""
        return self._exposition.render()

    def snapshot(self) -> dict[str, Any]:
        """What the page shows, as JSON values: rates, accept lengths, load, the last two minutes and the last requests."""
        now = self.clock()
        recent = self.window.recent(now, RECENT_SECONDS)
        report = self.report
        return {
            "model": self.model,
            "about": self.about,
            "uptime_s": round(now - self.started_at, 1),
            "num_drafts": self.num_drafts,
            "tokens_per_second": recent.tokens_per_second,
            "prompt_tokens_per_second": recent.prompt_tokens_per_second,
            "accept_length": {
                "recent": recent.accept_length,
                "overall": self.accept_length,
                "by_phase": {name: tally.accept_length for name, tally in self.phases.items()},
                "by_position": [
                    accepted / drafted if drafted else None
                    for accepted, drafted in zip(self.accepted_at, self.drafted_at)
                ],
            },
            "totals": {
                "requests": sum(self.endings.values()),
                "endings": dict(self.endings),
                "refusals": dict(self.refusals),
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "generation_tokens": self.generation_tokens,
                "reasoning_tokens": self.reasoning_tokens,
            },
            "engine": None if report is None else engine_state(report),
            "history": [
                {
                    "tokens": second.tokens,
                    "prompt_tokens": second.prompt_tokens,
                    "accept_length": 1 + second.accepted / second.rounds if second.rounds else None,
                }
                for second in self.window.past(now)
            ],
            "recent_requests": list(self.recent_requests),
        }


class RequestMeter:
    """Follows one request from its arrival to its end. As a context manager, leaving without `finished` counts "abort" when
    the task was cancelled or its stream closed, and "error" otherwise.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = metrics.clock()
        self._first: float | None = None
        self._last = self._start
        self._tally = PhaseTally()
        self._prompt_tokens = self._cached_tokens = 0
        self.is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_finished:
            # CancelledError and GeneratorExit are not Exceptions: the client went away, nothing is broken.
            self.finished("error" if kind is not None and issubclass(kind, Exception) else "abort")

    def step(self, phase: str, num_tokens: int, accepted: int = 0, drafted: int = 0) -> None:
        """Counts what one iteration of the engine added.

        Args:
            phase: where the answer stood when the tokens came; a name outside `Phase` counts as content.
            num_tokens: tokens that belong to the answer (fewer than accepted + 1 when a stop string cut them).
            accepted: drafts that were accepted, 0..`drafted`.
            drafted: drafts that were verified; 0 for the token that a prefill ends with.
        """
        metrics = self._metrics
        now = metrics.clock()
        second = metrics.window.at(now)
        if drafted:
            self._count_drafts(accepted, drafted)
            second.rounds += 1
            second.drafted += drafted
            second.accepted += accepted
        for tally in (metrics.phases.get(phase, metrics.phases["content"]), self._tally):
            tally.tokens += num_tokens
            tally.rounds += drafted > 0
            tally.drafted += drafted
            tally.accepted += accepted
        if num_tokens == 0:
            return
        metrics.generation_tokens += num_tokens
        second.tokens += num_tokens
        if self._first is None:
            self._first = now
            metrics.ttft.observe(now - self._start)
        else:
            # The tokens of one iteration arrive together: each is given its share of the time, or the median would be 0.
            metrics.inter_token.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now

    def _count_drafts(self, accepted: int, drafted: int) -> None:
        metrics = self._metrics
        for position in range(min(drafted, metrics.num_drafts)):
            metrics.drafted_at[position] += 1
            metrics.accepted_at[position] += position < accepted

    def prefilled(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts the prompt; `cached_tokens` of it were found in the prefix cache. Once per request."""
        if self._prompt_tokens:
            return
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        metrics = self._metrics
        metrics.prompt_tokens += prompt_tokens
        metrics.cached_tokens += cached_tokens
        metrics.prompt_length.observe(prompt_tokens)
        metrics.window.at(metrics.clock()).prompt_tokens += prompt_tokens - cached_tokens

    def finished(
        self,
        reason: str,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
        queued_s: float | None = None,
    ) -> None:
        """Ends the request; only the first call counts.

        Args:
            reason: one of `Ending`; anything else counts as "error".
            prompt_tokens: of the prompt, of which `cached_tokens` were found in the prefix cache; counted here unless
                `prefilled` did. 0 for a request that ended before its prompt ran.
            reasoning_tokens: of the generated ones, those inside the reasoning.
            queued_s: seconds in the engine before the request first ran; `None`: not known, and then neither queue nor
                prefill time is counted.
        """
        if self.is_finished:
            return
        self.is_finished = True
        metrics, now = self._metrics, self._metrics.clock()
        metrics.running_meters -= 1
        metrics.endings[reason if reason in metrics.endings else "error"] += 1
        metrics.reasoning_tokens += reasoning_tokens
        if prompt_tokens:
            self.prefilled(prompt_tokens, cached_tokens)
        metrics.e2e.observe(now - self._start)
        metrics.output_length.observe(self._tally.tokens)
        metrics.window.at(now).finished += 1
        if self._tally.accept_length is not None:
            metrics.request_accept_length.observe(self._tally.accept_length)
        self._count_times(queued_s)
        metrics.recent_requests.appendleft(self._summary(reason, now))
        for observe in metrics.observers:
            observe(self._timeline(reason, queued_s, now))

    def _timeline(self, reason: str, queued_s: float | None, now: float) -> Timeline:
        return Timeline(
            model=self._metrics.model,
            started=self._start,
            admitted=None if queued_s is None else self._start + queued_s,
            first=self._first,
            last=self._last,
            ended=now,
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            tokens=self._tally.tokens,
            accept_length=self._tally.accept_length,
        )

    def refused(self, kind: str) -> None:
        """Ends the request as one that the engine did not take: it is counted as refused, not as ended, and has no times."""
        if not self.is_finished:
            self.is_finished = True
            self._metrics.running_meters -= 1
            self._metrics.refused(kind)

    def _count_times(self, queued_s: float | None) -> None:
        metrics, first = self._metrics, self._first
        if queued_s is not None:
            metrics.queue_time.observe(queued_s)
        if first is None:
            return
        metrics.decode_time.observe(self._last - first)
        if self._tally.tokens > 1:
            metrics.time_per_output_token.observe((self._last - first) / (self._tally.tokens - 1))
        if queued_s is not None:
            metrics.prefill_time.observe(max(0.0, first - self._start - queued_s))
            metrics.inference_time.observe(max(0.0, self._last - self._start - queued_s))

    def _summary(self, reason: str, now: float) -> dict[str, Any]:
        """A line of the page's list of requests: numbers only, nothing of what was said."""
        first, tokens = self._first, self._tally.tokens
        decode = self._last - first if first is not None else math.nan
        return {
            "ended_at_s": round(now - self._metrics.started_at, 1),
            "reason": reason,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "tokens": tokens,
            "ttft_s": None if first is None else first - self._start,
            "tokens_per_second": (tokens - 1) / decode if tokens > 1 and decode > 0 else None,
            "accept_length": self._tally.accept_length,
            "e2e_s": now - self._start,
        }


def engine_state(report: Report) -> dict[str, Any]:
    """The engine's load for the page."""
    return {
        "running": report.running,
        "waiting": report.waiting,
        "total_pages": report.total_pages,
        "used_pages": report.used_pages,
        "cached_pages": report.cached_pages,
        "cache_usage": cache_usage(report),
        "iteration_s": report.median_iteration_seconds or None,
        "preemptions": report.counters.preemptions,
        "checked": report.counters.checked,
        "diverged": report.counters.diverged,
        "collapsed": report.counters.collapsed,
    }
