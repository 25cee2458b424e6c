"""What the server counts about requests, tokens and drafts, for `/metrics` and the page.

Owns the counters and what each of them means; `server.telemetry.exposition` gives them their Prometheus names. Must not know
HTTP. Called by `server.generation` (a meter per engine request), `server.api.admin` (`render`) and `server.api.page`
(`snapshot`), in the event loop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST

from legato.engine.messages import Report
from legato.server.telemetry.exposition import Dialect, Exposition, cache_usage
from legato.server.telemetry.meter import PhaseTally, RequestMeter, Timeline
from legato.server.telemetry.tally import Histogram, Window

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
        self.drafted_to = [0] * (num_drafts + 1)
        self.accepted_to = [0] * (num_drafts + 1)
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
        self.window = Window(HISTORY_SECONDS)
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
    def drafted_at(self) -> list[int]:
        """Drafts that were verified, by position."""
        return _at_positions(self.drafted_to)

    @property
    def accepted_at(self) -> list[int]:
        """Drafts that were accepted, by position."""
        return _at_positions(self.accepted_to)

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


def _at_positions(rounds_to: Sequence[int]) -> list[int]:
    """From rounds by the number of drafts that counted in them (none is the first entry) to rounds in which the draft at each
    position counted."""
    return list(accumulate(reversed(rounds_to[1:])))[::-1]


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
