"""One request from its arrival to its end: what each of its steps counts, and when what happened.

Owns the rules of counting (per token and not per chunk, a round only where drafts were verified) and the timeline that
observers are told. Made by `server.telemetry.metrics`; called by `server.generation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from legato.server.telemetry.metrics import Metrics


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
        everybody, own = metrics.phases.get(phase) or metrics.phases["content"], self._tally
        if drafted:
            self._count_drafts(accepted, drafted)
            second.rounds += 1
            second.drafted += drafted
            second.accepted += accepted
            for tally in (everybody, own):
                tally.rounds += 1
                tally.drafted += drafted
                tally.accepted += accepted
        everybody.tokens += num_tokens
        own.tokens += num_tokens
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
        verified = min(drafted, metrics.num_drafts)
        metrics.drafted_to[verified] += 1
        metrics.accepted_to[min(accepted, verified)] += 1

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
