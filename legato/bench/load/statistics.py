"""From replies to figures: latencies as users feel them, throughput, goodput.

Owns every definition; each is in the docstring of the field that holds it. Pure arithmetic on `Reply` values. Called by
`legato.bench.load.run`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from legato.bench.load.endpoint import Reply
from legato.config import ConfigError


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and quantiles (interpolated linearly between order statistics); NaN where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        if not ordered:
            return Distribution(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
        return Distribution(
            mean=math.fsum(ordered) / len(ordered),
            p50=quantile(ordered, 0.5),
            p90=quantile(ordered, 0.9),
            p99=quantile(ordered, 0.99),
            largest=ordered[-1],
            count=len(ordered),
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, interpolated linearly."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user is promised, in seconds; a request that keeps all of them counts for goodput."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @staticmethod
    def parse(text: str) -> Limits:
        """`ttft=500ms,tpot=20ms,e2e=10s` in any order, each once.

        Raises:
            ConfigError: it says what is wrong.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|tpot|e2e)\s*=\s*([0-9.]+)\s*(ms|s)\s*", part)
            if match is None or f"{match[1]}_s" in found or not _is_number(match[2]):
                raise ConfigError(f"--goodput must look like ttft=500ms,tpot=20ms,e2e=10s, got {part.strip()!r}")
            found[f"{match[1]}_s"] = float(match[2]) / (1000 if match[3] == "ms" else 1)
        return Limits(**found)

    def kept_by(self, reply: Reply) -> bool:
        """Whether a reply came in time. One that cannot be judged (no time per token from one chunk) keeps that limit."""
        pairs = ((self.ttft_s, ttft_s(reply)), (self.tpot_s, tpot_s(reply)), (self.e2e_s, e2e_s(reply)))
        return reply.error is None and all(limit is None or not value > limit for limit, value in pairs)


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def ttft_s(reply: Reply) -> float:
    """Time to the first token, from when the request should have been sent."""
    return reply.chunks[0].at - reply.scheduled if reply.chunks else math.nan


def e2e_s(reply: Reply) -> float:
    """Time to the last token, from when the request should have been sent."""
    return reply.ended - reply.scheduled


def tpot_s(reply: Reply) -> float:
    """Time per token after the first chunk: a chunk may carry several tokens, and those of the first count for the TTFT.

    NaN with fewer than two chunks, or where the server does not count tokens.
    """
    if reply.completion_tokens is None or len(reply.chunks) < 2:
        return math.nan
    later = reply.completion_tokens - (reply.chunks[0].tokens or 1)
    return (reply.chunks[-1].at - reply.chunks[0].at) / later if later > 0 else math.nan


def gaps_s(reply: Reply) -> list[float]:
    """Times between chunks: what a reader sees. With speculation a chunk carries several tokens, so this is no time per token."""
    return [later.at - earlier.at for earlier, later in zip(reply.chunks, reply.chunks[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Times in seconds. Failed requests count in `failed` and nowhere else.

    Attributes:
        requests, failed: sent, and without a whole reply.
        duration_s: from the first scheduled request to the end of the last reply.
        ttft, tpot, chunk_gap, e2e, lag: over successful requests; `lag` is how late the client itself sent them (it should
            be next to nothing: a large one means that the client, not the server, was measured).
        prompt_tokens, cached_tokens, completion_tokens: sums of the server's own counts; `None` where it gives none.
        tokens_per_s: completion tokens by `duration_s`.
        user_tokens_per_s: median over requests of 1 / time per token: what one user sees.
        tokens_per_chunk: mean; NaN where the server does not say.
        requests_per_s: successful requests by `duration_s`.
        goodput_per_s: requests per second that kept all limits; `None` without limits.
    """

    requests: int
    failed: int
    duration_s: float
    ttft: Distribution
    tpot: Distribution
    chunk_gap: Distribution
    e2e: Distribution
    lag: Distribution
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    tokens_per_s: float | None
    user_tokens_per_s: float
    tokens_per_chunk: float
    requests_per_s: float
    goodput_per_s: float | None

    @staticmethod
    def of(replies: Sequence[Reply], limits: Limits | None = None) -> Summary:
        """Raises ValueError without replies."""
        if not replies:
            raise ValueError("no replies to summarise")
        good = [reply for reply in replies if reply.error is None]
        duration = max(reply.ended for reply in replies) - min(reply.scheduled for reply in replies)
        completion = _sum(reply.completion_tokens for reply in good)
        tpot = Distribution.of(value for value in map(tpot_s, good) if not math.isnan(value))
        carried = [chunk.tokens for reply in good for chunk in reply.chunks if chunk.tokens is not None]
        return Summary(
            requests=len(replies),
            failed=len(replies) - len(good),
            duration_s=duration,
            ttft=Distribution.of(map(ttft_s, good)),
            tpot=tpot,
            chunk_gap=Distribution.of(gap for reply in good for gap in gaps_s(reply)),
            e2e=Distribution.of(map(e2e_s, good)),
            lag=Distribution.of(reply.sent - reply.scheduled for reply in good),
            prompt_tokens=_sum(reply.prompt_tokens for reply in good),
            cached_tokens=_sum(reply.cached_tokens for reply in good),
            completion_tokens=completion,
            tokens_per_s=None if completion is None else completion / duration,
            user_tokens_per_s=1 / tpot.p50 if tpot.count and tpot.p50 > 0 else math.nan,
            tokens_per_chunk=sum(carried) / len(carried) if carried else math.nan,
            requests_per_s=len(good) / duration,
            goodput_per_s=None if limits is None else sum(map(limits.kept_by, good)) / duration,
        )

    def fields(self) -> dict[str, Any]:
        """As a part of a record; NaN where nothing was measured."""
        return asdict(self)


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if not known or any(count is None for count in known) else sum(count or 0 for count in known)
