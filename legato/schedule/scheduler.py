"""The scheduler: turns requests and outcomes into plans. Pure code that decides everything and computes nothing.

It never over-commits: a request is admitted when a row and every page it can ever need are free, so nothing admitted has to
be thrown out. Called by `engine.loop`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from legato.plan import Admit, Emission, Extend, Outcome, Plan, PromptLogprobs
from legato.schedule.controls import controls_of
from legato.schedule.pool import Pool
from legato.schedule.request import Request, RequestError, Sequence
from legato.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine offers: `context` is the longest prompt plus output, `chunk_tokens` the most rows one iteration runs,
    `num_drafts` is K, `num_pages` includes the dummy page 0."""

    max_running: int
    chunk_tokens: int
    context: int
    num_drafts: int
    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What one iteration brought to one request. Every request that was added ends with exactly one `finish_reason`."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    accepted: int = 0
    drafted: int = 0


class Scheduler:
    """First come, first served; running requests decode in every iteration, and prompts fill the rest of its rows in chunks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages = Pool(limits.num_pages - 1)
        self.rows = Pool(limits.max_running)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[Progress] = []
        self._epoch = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or an end is still to be reported."""
        return bool(self._by_id or self._ended)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: the id is in use, the prompt is empty or too long, or the request needs more pages than exist.
        """
        if request.id in self._by_id:
            raise RequestError(f"request id {request.id!r} is already in use")
        if not request.prompt:
            raise RequestError("the prompt has no tokens")
        prompt_len = len(request.prompt)
        if prompt_len >= self.limits.context:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the context of {self.limits.context} must also hold at least one new token"
            )
        max_length = self.limits.context
        if request.params.max_tokens is not None:
            if prompt_len + request.params.max_tokens > self.limits.context:
                raise RequestError(
                    f"the prompt has {prompt_len} tokens and max_tokens is {request.params.max_tokens}: "
                    f"together more than the context of {self.limits.context}"
                )
            max_length = prompt_len + request.params.max_tokens
        sequence = Sequence(request, max_length)
        if self._pages_needed(sequence) > self.pages.capacity:
            raise RequestError(
                f"the request can grow to {max_length} tokens; the cache holds {self.pages.capacity * self.limits.page_size}"
            )
        self._by_id[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; unknown or finished ids are ignored (the abort may cross the end on its way)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
            del self._by_id[request_id]
        else:
            self._release(sequence)
        self._ended.append(Progress(request_id, (), "abort"))

    def plan(self) -> Plan:
        """The next iteration. Empty when nothing can run."""
        admits: list[Admit] = []
        decodes = tuple(row for row, sequence in self._running.items() if sequence.state == "decoding")
        # Prompts get what running requests leave of the iteration, and never less than a quarter: no one starves.
        rows = self.limits.chunk_tokens - len(decodes) * (self.limits.num_drafts + 1)
        budget = max(rows, self.limits.chunk_tokens // 4, 1)
        extends: list[Extend] = []
        for sequence in list(self._running.values()):
            if sequence.state == "prefilling" and budget > 0:
                extends.append(self._extend(sequence, budget))
                budget -= len(extends[-1].tokens)
        while self._waiting and budget > 0 and self.rows.num_free:
            pages = self.pages.take(self._pages_needed(self._waiting[0]))
            if pages is None:
                break
            sequence = self._waiting.popleft()
            admits.append(self._admit(sequence, pages))
            extends.append(self._extend(sequence, budget))
            budget -= len(extends[-1].tokens)
        plan = Plan(self._epoch, tuple(admits), tuple(extends), decodes)
        if not plan.is_empty:
            for row in decodes + tuple(extend.row for extend in extends):
                self._running[row].last_epoch = self._epoch
            self._epoch += 1
        return plan

    def settle(self, outcome: Outcome) -> list[Progress]:
        """Takes in what an iteration brought, and frees what only it could still touch."""
        progress: list[Progress] = []
        for some in outcome.prompt_logprobs:
            sequence = self._running.get(some.row)
            if sequence is not None:
                progress.append(Progress(sequence.request.id, (), None, prompt_logprobs=some))
        for emission in outcome.emissions:
            sequence = self._running.get(emission.row)
            if sequence is None:
                continue  # ended (a stop string, an abort) while the iteration was in flight
            progress += self._take(sequence, emission)
        self.pages.settle(outcome.epoch)
        self.rows.settle(outcome.epoch)
        return progress

    def take_ended(self) -> list[Progress]:
        """Ends that no outcome carries (aborts), once."""
        ended, self._ended = self._ended, []
        return ended

    def _take(self, sequence: Sequence, emission: Emission) -> list[Progress]:
        sequence.output.extend(emission.tokens)
        reason: FinishReason | None = None
        if emission.done:
            is_stop = bool(emission.tokens) and emission.tokens[-1] in sequence.request.stop_ids
            reason = "stop" if is_stop else "length"
            self._release(sequence)
        elif not emission.tokens:
            return []
        progress = Progress(
            sequence.request.id,
            emission.tokens,
            reason,
            emission.logprobs,
            accepted=emission.accepted,
            drafted=emission.drafted,
        )
        return [progress]

    def _pages_needed(self, sequence: Sequence) -> int:
        """Rows of rejected drafts reach at most K positions past the last token."""
        return -(-(sequence.max_length + self.limits.num_drafts) // self.limits.page_size)

    def _admit(self, sequence: Sequence, pages: tuple[int, ...]) -> Admit:
        taken = self.rows.take(1)
        assert taken is not None, "plan() checks for a free row"
        sequence.row, sequence.pages, sequence.state = taken[0], pages, "prefilling"
        self._running[sequence.row] = sequence
        request, params = sequence.request, sequence.request.params
        return Admit(
            row=sequence.row,
            pages=pages,
            max_length=sequence.max_length,
            stop_ids=request.stop_ids,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=request.seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            num_drafts=request.num_drafts,
            controls=controls_of(request, sequence.output),
        )

    def _extend(self, sequence: Sequence, budget: int) -> Extend:
        start, prompt = sequence.launched, sequence.request.prompt
        stop = min(start + budget, len(prompt))
        sequence.launched = stop
        if stop == len(prompt):
            sequence.state = "decoding"
        return Extend(sequence.row, start, prompt[start:stop], prompt[stop] if stop < len(prompt) else None)

    def _release(self, sequence: Sequence) -> None:
        """Gives row and pages back: free as soon as no launched iteration can touch them."""
        sequence.state = "finished"
        self.pages.give_back(sequence.pages, sequence.last_epoch)
        self.rows.give_back((sequence.row,), sequence.last_epoch)
        del self._running[sequence.row]
        del self._by_id[sequence.request.id]
