"""The engine watching itself: replays a share of its requests without drafts, and notices accept lengths that collapse.

Speculation must change speed and not one token, and a draft layer that is fed wrongly shows in its accept length first. Owns the
replays, the thresholds and the counters of both. Never touches a tensor. Called by `engine.loop`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from legato.schedule import Progress, Request
from legato.types import Divergence, TokenLogprob

LOG = logging.getLogger(__name__)

REPLAY = "replay of "
"""Ids of replays start with it; callers of the engine make their requests' ids otherwise."""

LAST = -(2**31)
"""Priority of replays."""

JUDGED_TOKENS = 128
LOWEST_LENGTH = 1.4
HIGHEST_SHARE = 0.96
"""A request's drafting is suspicious when, after `JUDGED_TOKENS` tokens, an iteration brings fewer than `LOWEST_LENGTH` tokens
(the draft layer does not see what the target sees) or more than `HIGHEST_SHARE` of its drafts are accepted (the text goes round
in circles)."""


@dataclass(slots=True)
class _Watched:
    request: Request
    tokens: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Replay:
    original: _Watched
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])


class SelfCheck:
    """Replays `share` of the finished requests (0..1, evenly: every second one at 0.5) with zero drafts, and compares tokens.

    A request counts as finished at an end, at its limit, and where its caller stopped it; what had come until then is replayed.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.reset()
        self._due = 0.0
        self._watched: dict[str, _Watched] = {}
        self._replays: dict[str, _Replay] = {}

    def reset(self) -> None:
        """Starts the counters anew."""
        self.checked = self.diverged = 0
        self.first: Divergence | None = None

    def watch(self, request: Request) -> None:
        """A request has been submitted. One that does not draft has nothing to be checked."""
        if self.share > 0 and request.num_drafts != 0:
            self._watched[request.id] = _Watched(request)

    def take(self, progress: list[Progress]) -> tuple[list[Progress], list[Request]]:
        """What a turn brought, in two: what belongs to users, and replays that are to be submitted now."""
        if not self._watched and not self._replays:
            return progress, []
        outward: list[Progress] = []
        replays: list[Request] = []
        for entry in progress:
            replay, watched = self._replays.get(entry.request_id), self._watched.get(entry.request_id)
            if replay is not None:
                self._grow(entry, replay)
                continue
            outward.append(entry)
            if watched is not None:
                watched.tokens += entry.tokens
                if entry.finish_reason is not None:
                    del self._watched[entry.request_id]
                    replays += self._replay(watched)
        return outward, replays

    def forget(self, replay: Request) -> None:
        """A replay could not be submitted."""
        del self._replays[replay.id]

    def _replay(self, watched: _Watched) -> list[Request]:
        self._due += self.share if watched.tokens else 0.0
        if self._due < 1.0 or not watched.tokens:
            return []
        self._due -= 1.0
        request, count = watched.request, len(watched.tokens)
        params = replace(
            request.params,
            max_tokens=count,
            min_tokens=min(request.params.min_tokens, count),
            logprobs=2,  # two rivals give the margin
            prompt_logprobs=None,
        )
        name = REPLAY + request.id
        # A salt of its own: it shares no cached page, so that what is wrong there shows as well. It gives way to everyone.
        again = replace(request, id=name, params=params, num_drafts=0, cache_salt=name, priority=LAST, deadline=None)
        self._replays[again.id] = _Replay(watched)
        return [again]

    def _grow(self, entry: Progress, replay: _Replay) -> None:
        replay.tokens += entry.tokens
        replay.logprobs += entry.logprobs or ()
        if entry.finish_reason is None:
            return
        del self._replays[entry.request_id]
        if entry.finish_reason == "abort":
            return
        self.checked += 1
        emitted, request = replay.original.tokens, replay.original.request
        divergence = first_divergence(request.id, emitted, replay.tokens, replay.logprobs)
        if divergence is not None:
            self.diverged += 1
            self.first = self.first or divergence
            LOG.warning("speculation changed a token: %s", divergence)


def first_divergence(
    request_id: str, emitted: list[int], replayed: list[int], logprobs: list[TokenLogprob]
) -> Divergence | None:
    """The first place where a request and its replay without drafts differ; `logprobs` are the replay's, with two rivals each."""
    for position, token in enumerate(emitted):
        other = replayed[position] if position < len(replayed) else None
        if token != other:
            rivals = logprobs[position].top if position < len(logprobs) else ()
            margin = rivals[0][1] - rivals[1][1] if len(rivals) > 1 else None
            return Divergence(request_id, position, token, other, margin)
    return None


@dataclass(slots=True)
class _Drafting:
    tokens: int = 0
    iterations: int = 0
    accepted: int = 0
    drafted: int = 0

    def add(self, entry: Progress) -> None:
        self.tokens += len(entry.tokens)
        self.iterations += 1
        self.accepted += entry.accepted
        self.drafted += entry.drafted

    def fault(self) -> str | None:
        """What is wrong, once there is enough to judge."""
        if self.tokens < JUDGED_TOKENS:
            return None
        length, share = self.tokens / self.iterations, self.accepted / self.drafted
        if length < LOWEST_LENGTH:
            return f"accept length {length:.2f} is below {LOWEST_LENGTH} after {self.tokens} tokens"
        if share > HIGHEST_SHARE:
            return (
                f"{share:.1%} of the drafts were accepted over {self.tokens} tokens: the text may go round in circles"
            )
        return None


class AcceptMonitor:
    """Watches accept lengths, request by request and over all of them; each request is judged once, the whole again and again."""

    def __init__(self) -> None:
        self.collapsed = 0
        self._requests: dict[str, _Drafting] = {}
        self._judged: set[str] = set()
        self._all = _Drafting()

    def take(self, progress: list[Progress]) -> None:
        """What a turn brought. Requests and turns without drafts are not judged."""
        for entry in progress:
            if entry.drafted and entry.tokens and entry.request_id not in self._judged:
                drafting = self._requests.setdefault(entry.request_id, _Drafting())
                drafting.add(entry)
                if drafting.tokens >= JUDGED_TOKENS:
                    self._judged.add(entry.request_id)
                    self._report(entry.request_id, drafting)
            if entry.drafted and entry.tokens:
                self._all.add(entry)
            if entry.finish_reason is not None:
                self._requests.pop(entry.request_id, None)
                self._judged.discard(entry.request_id)
        if self._all.tokens >= 8 * JUDGED_TOKENS:
            fault, self._all = self._all.fault(), _Drafting()
            if fault is not None:
                LOG.warning("drafting of all requests together: %s", fault)

    def _report(self, request_id: str, drafting: _Drafting) -> None:
        fault = drafting.fault()
        if fault is not None:
            self.collapsed += 1
            LOG.warning("drafting of %s: %s", request_id, fault)
