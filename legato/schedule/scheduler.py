"""The scheduler: turns requests and outcomes into plans. Pure code that decides everything and computes nothing.

Pages grow with a request. One is admitted when the cache can hold all its known text, its first iteration and a spare page for
everyone who runs; when pages run out all the same, the least important request is preempted. Called by `engine.loop`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from legato.plan import Admit, Emission, Extend, Outcome, PageGrant, Plan, PromptLogprobs
from legato.schedule.controls import controls_of
from legato.schedule.depth import Depths
from legato.schedule.limits import Limits
from legato.schedule.pace import Pace
from legato.schedule.pages import Pages
from legato.schedule.pool import Pool
from legato.schedule.queue import Deadlines, WaitingQueue, rank_of
from legato.schedule.request import Progress, QueueFull, Request, RequestError, Sequence
from legato.types import FinishReason


@dataclass(frozen=True, slots=True)
class _Pass:
    """Chunks that have been through the layers before `stop` and must go on."""

    extends: tuple[Extend, ...]
    stop: int


class Scheduler:
    """Running requests decode in every iteration, and prompts fill the rest of its rows in chunks. Most important first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages = Pages(limits.num_pages - 1, limits.page_size, limits.prefix_cache, limits.host_pages)
        self.rows = Pool(limits.max_running)
        self.num_preemptions = 0
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._running: dict[int, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[Progress] = []
        self._launched: dict[int, Plan] = {}
        self._epoch = self._arrivals = 0
        self._refused: tuple[Sequence, int] | None = None
        self._depths = Depths(limits.depths or (limits.num_drafts,))
        self.pace = Pace(limits.layers, limits.slowdown, limits.end_rows, limits.end_layers)
        self._pass: _Pass | None = None
        self._drops = False

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
            QueueFull: it could not run at once, and as many requests wait as may.
            RequestError: the id is in use, the prompt is empty or too long, or the request needs more pages than exist.
        """
        if request.id in self._by_id:
            raise RequestError(f"request id {request.id!r} is already in use", "id")
        max_length = self.limits.max_length(request)
        waiting = len(self._waiting) - self._num_admissible
        if self.limits.max_waiting is not None and waiting >= self.limits.max_waiting:
            raise QueueFull(f"nothing is free to run it, and {waiting} requests wait already, the most that may")
        self._arrivals += 1
        sequence = Sequence(request, (-request.priority, self._arrivals), max_length, list(request.prompt))
        self._by_id[request.id] = sequence
        self._waiting.add(sequence)
        self._deadlines.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; unknown or finished ids are ignored (the abort may cross the end on its way)."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._cancel(sequence, "abort")

    def preempt(self, request_id: str) -> None:
        """Sends a running request back to wait, to free its row and pages; ids of others are ignored.

        It resumes by running its text again, as far as the cache does not hold it; no token is lost, repeated or changed.
        """
        sequence = self._by_id.get(request_id)
        if sequence is not None and sequence.state != "waiting":
            self._preempt(sequence)

    def flush_cache(self) -> int:
        """Empties the prefix cache; returns how many pages it held."""
        return self.pages.flush()

    def plan(self, now: float) -> Plan:
        """The next iteration. Empty when nothing can run.

        Args:
            now: time on the clock of the requests' deadlines.
        """
        for sequence in self._deadlines.expired(now):
            self._cancel(sequence, "deadline")
        grants = self._top_up()
        ranked = sorted(self._running.values(), key=rank_of)
        decodes = tuple(sequence.row for sequence in ranked if self._can_decode(sequence))
        num_drafts = self._num_drafts(decodes)
        admits: list[Admit] = []
        if self._pass is not None:
            extends = self._pass.extends
        elif self.pace.goes_alone(len(decodes), num_drafts):
            extends = ()
        else:
            extends = self._chunks(ranked, admits, len(decodes), now)
        layers = self._layers(extends, len(decodes), num_drafts)
        moves = self.pages.take_moves() if extends or decodes else ()
        drops, self._drops = self._drops, False
        plan = Plan(self._epoch, tuple(admits), extends, decodes, tuple(grants), moves, num_drafts, layers, drops)
        if not plan.is_empty:
            self._launch(plan)
        return plan

    def _chunks(self, ranked: list[Sequence], admits: list[Admit], num_decoding: int, now: float) -> tuple[Extend, ...]:
        """The next chunks of prompts; requests that are admitted for them are added to `admits`."""
        budget = self._budget(num_decoding)
        extends: list[Extend] = []
        for sequence in ranked:
            if sequence.state == "prefilling" and budget > 0:
                extends.append(self._extend(sequence, budget))
                budget -= len(extends[-1].tokens)
        while budget > 0 and (sequence := self._admit_next()) is not None:
            if sequence.admitted_at is None:
                sequence.admitted_at = now
            admits.append(self._admission(sequence))
            extends.append(self._extend(sequence, budget))
            budget -= len(extends[-1].tokens)
        return tuple(extends)

    def _budget(self, num_decoding: int) -> int:
        """Rows of prompts in one plan: a whole chunk where they run between the iterations of others. In the same rows they get
        what running requests leave, and never less than a quarter: no one starves."""
        limits = self.limits
        if self.pace.cuts:
            return limits.chunk_tokens
        rows = limits.chunk_tokens - num_decoding * (limits.num_drafts + 1)
        return max(rows, limits.chunk_tokens // 4, 1)

    def _num_drafts(self, decodes: tuple[int, ...]) -> int:
        """K of an iteration: what measurements say, for requests that ask for no number; and enough for those that do."""
        asked = [self._running[row].request.num_drafts for row in decodes]
        named = [number for number in asked if number is not None]
        enough = self._depths.at_least(max(named)) if named else 0
        return enough if decodes and len(named) == len(asked) else max(enough, self._depths.choose(max(len(asked), 1)))

    def _layers(self, extends: tuple[Extend, ...], num_decoding: int, num_drafts: int) -> range | None:
        """Through which layers the chunks go in this plan; `None`: all of them."""
        if not extends or not self.pace.cuts:
            return None
        start, stop = self._pass.stop if self._pass else 0, self.pace.end
        if num_decoding:
            stop = self.pace.stop(start, extends, num_decoding, num_drafts)
        return None if (start, stop) == (0, self.pace.end) else range(start, stop)

    def is_whole(self, plan: Plan) -> bool:
        """Whether the plan's chunks, if it has any, come to the end with it."""
        return plan.layers is None or plan.layers.stop == self.pace.end

    def settle(self, outcome: Outcome, seconds: float | None = None) -> list[Progress]:
        """Takes in what an iteration brought, and frees what only it could still touch.

        What it brought to a request that has ended or was preempted meanwhile is dropped: nobody waits for it, or it comes again.
        `seconds`: from the end of the iteration before it to its own, where the device worked all the time.
        """
        progress: list[Progress] = []
        plan = self._launched.pop(outcome.epoch)
        self._observe(plan, outcome, seconds)
        for row in plan.decodes:
            if (sequence := self._running.get(row)) is not None:
                sequence.in_flight -= 1
        ran = plan.extends if self.is_whole(plan) else ()
        for extend in ran:
            if (sequence := self._running.get(extend.row)) is not None:
                sequence.committed = extend.start + len(extend.tokens)
        for some in outcome.prompt_logprobs:
            if (sequence := self._running.get(some.row)) is not None:
                progress += self._report(sequence, some)
        for emission in outcome.emissions:
            if (sequence := self._running.get(emission.row)) is not None:
                progress += self._take(sequence, emission)
        for extend in ran:
            if extend.next_token is not None and (sequence := self._running.get(extend.row)) is not None:
                self._commit(sequence)
        self.pages.pool.settle(outcome.epoch)
        self.rows.settle(outcome.epoch)
        return progress

    def take_ended(self) -> list[Progress]:
        """Ends that no outcome carries (aborts, deadlines), once."""
        ended, self._ended = self._ended, []
        return ended

    def _top_up(self) -> list[PageGrant]:
        """Grows decoding requests so that the next iteration cannot reach past their pages, the most important first.

        When pages are short the least important request makes room. One that nobody less important can make room for keeps what
        it has and stops at its capacity; the most important request always finds room.
        """
        grants: list[PageGrant] = []
        for sequence in sorted(self._running.values(), key=rank_of):
            if sequence.state != "decoding":
                continue  # a prompt holds all its pages; or it was preempted for one before it in this loop
            count = self._growth(sequence) - len(sequence.pages)
            if count <= 0:
                continue
            while count > self.pages.num_available + self.pages.pool.num_quarantined:
                victim = max(self._running.values(), key=rank_of)
                if victim is sequence:
                    break
                self._preempt(victim)
            taken = self.pages.take(count)
            if taken is not None:
                grants.append(PageGrant(sequence.row, len(sequence.pages), taken))
                sequence.pages.extend(taken)
        return grants

    def _growth(self, sequence: Sequence) -> int:
        """Pages with which one more iteration cannot reach the end of them: never more than one beyond what settled tokens
        fill, as long as the rows of the iterations in the air and of one more fit a page."""
        most = sequence.most_length(self.limits.num_drafts, self.limits.page_size)
        return self.pages.needed(min(most + self.limits.num_drafts + 1, sequence.max_length - 1))

    def _can_decode(self, sequence: Sequence) -> bool:
        is_full = sequence.least_length >= len(sequence.pages) * self.limits.page_size
        return sequence.state == "decoding" and not is_full

    @property
    def _num_admissible(self) -> int:
        """Rows for those that the next plans admit, however many have arrived. None while pages are short: all wait then."""
        is_short = self._refused is not None and self._refused[0].state == "waiting"
        return 0 if is_short else self.limits.max_running - len(self._running)

    def _admit_next(self) -> Sequence | None:
        """Gives the first that waits a row and its pages, or leaves everything as it is."""
        if not self._waiting or not self.rows.num_free:
            return None
        sequence, available = self._waiting.first, self.pages.num_available
        if (
            self._running
            and self._refused is not None
            and self._refused[0] is sequence
            and available <= self._refused[1]
        ):
            return None  # nothing has become free since
        holding = self.pages.find(sequence.request.cache_salt, sequence.text, self._reusable(sequence))
        num_cached = holding.num_found
        count = self._growth_at_admission(sequence) - len(holding.pages)
        reserve = sum(self._may_grow(running) for running in self._running.values())
        fits = count + reserve <= self.pages.num_available
        taken = self.pages.take(count) if fits else None
        if taken is None:
            self.pages.forget(holding)
            self._refused = (sequence, self.pages.num_available)  # what was evicted for it is in quarantine
            return None
        self.pages.seat(holding, taken)
        self._seat(sequence, num_cached * self.limits.page_size)
        sequence.holding = holding
        return sequence

    def _growth_at_admission(self, sequence: Sequence) -> int:
        return self.pages.needed(min(len(sequence.text) + self.limits.num_drafts + 1, sequence.max_length - 1))

    def _may_grow(self, sequence: Sequence) -> bool:
        return len(sequence.pages) < self.pages.needed(sequence.max_length - 1)

    def _reusable(self, sequence: Sequence) -> int:
        """Most pages to take from the cache: none while log-probabilities of the prompt are owed, whose rows must run."""
        owes = sequence.request.params.prompt_logprobs is not None and not sequence.output
        return 0 if owes else len(sequence.text) // self.limits.page_size

    def _seat(self, sequence: Sequence, num_cached: int) -> None:
        taken = self.rows.take(1)
        assert taken is not None, "a free row was seen"
        self._waiting.remove(sequence)
        self._refused = None
        sequence.row, sequence.state = taken[0], "prefilling"
        sequence.prefill, sequence.launched, sequence.committed = len(sequence.text), num_cached, num_cached
        sequence.in_flight, sequence.last_epoch = 0, -1
        if sequence.cached is None:
            sequence.cached = num_cached
        self._running[sequence.row] = sequence
        self.pages.counters.prompt_tokens += sequence.prefill
        self.pages.counters.hit_tokens += num_cached

    def _admission(self, sequence: Sequence) -> Admit:
        request, params, output = sequence.request, sequence.request.params, sequence.output
        return Admit(
            row=sequence.row,
            pages=tuple(sequence.pages),
            max_length=sequence.max_length,
            stop_ids=request.stop_ids,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=request.seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None or output else params.prompt_logprobs,
            num_drafts=request.num_drafts,
            controls=controls_of(request, output),
        )

    def _extend(self, sequence: Sequence, budget: int) -> Extend:
        start, text = sequence.launched, sequence.text
        stop = min(start + budget, sequence.prefill)
        sequence.launched = stop
        return Extend(sequence.row, start, tuple(text[start:stop]), text[stop] if stop < sequence.prefill else None)

    def _launch(self, plan: Plan) -> None:
        for row in plan.decodes:
            self._running[row].in_flight += 1
        for row in (*plan.decodes, *(extend.row for extend in plan.extends)):
            self._running[row].last_epoch = plan.epoch
        is_whole = self.is_whole(plan)
        for extend in plan.extends if is_whole else ():
            if extend.next_token is None:
                self._running[extend.row].state = "decoding"
        self._pass = _Pass(plan.extends, plan.layers.stop) if plan.layers is not None and not is_whole else None
        self._launched[plan.epoch] = plan
        self._epoch += 1

    def _observe(self, plan: Plan, outcome: Outcome, seconds: float | None) -> None:
        if not plan.decodes:
            return
        if seconds is not None:
            self.pace.observe(plan, seconds)
        free = {row for row in plan.decodes if row in self._running and self._running[row].request.num_drafts is None}
        accepted = [emission.accepted for emission in outcome.emissions if emission.row in free and emission.tokens]
        alone = seconds if not plan.extends else None
        self._depths.observe(plan.num_drafts, accepted, len(plan.decodes), alone)

    def _take(self, sequence: Sequence, emission: Emission) -> list[Progress]:
        sequence.text.extend(emission.tokens)
        sequence.committed = sequence.least_length
        self._commit(sequence)
        reason: FinishReason | None = None
        if emission.done:
            is_stop = bool(emission.tokens) and emission.tokens[-1] in sequence.request.stop_ids
            reason = "stop" if is_stop else "length"
            self._end(sequence)
        elif not emission.tokens:
            return []
        progress = Progress(
            sequence.request.id,
            emission.tokens,
            reason,
            emission.logprobs,
            accepted=emission.accepted,
            drafted=emission.drafted,
            cached_tokens=sequence.cached or 0,
            admitted_at=sequence.admitted_at,
        )
        return [progress]

    def _report(self, sequence: Sequence, some: PromptLogprobs) -> Iterable[Progress]:
        """Passes on what a chunk says about the prompt, but for what was passed on before a preemption."""
        stop = some.start + len(some.logprobs)
        start = max(some.start, sequence.reported)
        if start < stop:
            sequence.reported = stop
            fresh = PromptLogprobs(some.row, start, some.logprobs[start - some.start :])
            yield Progress(sequence.request.id, (), None, prompt_logprobs=fresh, cached_tokens=sequence.cached or 0)

    def _commit(self, sequence: Sequence) -> None:
        if sequence.holding is not None:
            self.pages.commit(sequence.holding, sequence.text, sequence.committed)

    def _cancel(self, sequence: Sequence, reason: FinishReason) -> None:
        self._end(sequence)
        cached, admitted_at = sequence.cached or 0, sequence.admitted_at
        self._ended.append(Progress(sequence.request.id, (), reason, cached_tokens=cached, admitted_at=admitted_at))

    def _preempt(self, sequence: Sequence) -> None:
        self._unseat(sequence)
        sequence.state = "waiting"
        self._waiting.add(sequence)
        self.num_preemptions += 1

    def _end(self, sequence: Sequence) -> None:
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
        else:
            self._unseat(sequence)
        sequence.state = "finished"
        del self._by_id[sequence.request.id]

    def _unseat(self, sequence: Sequence) -> None:
        """Gives row and pages back: free, or shared as far as they are settled, once no launched iteration can touch them."""
        assert sequence.holding is not None, "what runs holds pages"
        if self._pass is not None and any(extend.row == sequence.row for extend in self._pass.extends):
            self._drop_pass(self._pass)
        self.pages.release(sequence.holding, sequence.text, sequence.committed, sequence.last_epoch)
        self.rows.give_back((sequence.row,), sequence.last_epoch)
        del self._running[sequence.row]
        sequence.holding = None

    def _drop_pass(self, dropped: _Pass) -> None:
        """Chunks that are half through the layers run again from the first: one of their requests gives its pages away."""
        for extend in dropped.extends:
            self._running[extend.row].launched = extend.start
        self._pass, self._drops = None, True
