"""The scheduler under random events over a toy device: nothing is lost, shared wrongly, leaked, over-committed or said twice."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from legato.plan import Outcome, Plan, Restore
from legato.schedule import Limits, Progress, QueueFull, Request, RequestError, Scheduler
from legato.schedule.prefix import Node
from legato.schedule.request import Sequence
from legato.types import SamplingParams
from tests.schedule.device import EOS, WORDS, Device, reference

K = 3
CONTEXT = 40
FAMILIES = [tuple(random.Random(n).randrange(WORDS) for _ in range(CONTEXT + 5)) for n in range(2)]


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, turns, aborts, preemptions, evictions, flushes, passing time in any order, with a flight in the air or none."""

    @initialize(
        page=st.sampled_from((1, 4, 16)),
        room=st.sampled_from((1.2, 2, 5)),
        cache=st.booleans(),
        queue=st.integers(0, 20),
        host=st.sampled_from((0, 0.4, 2, 5)),
        slowdown=st.sampled_from((0.0, 2.0)),
        depths=st.sampled_from(((), (1, K))),
    )
    def start(
        self, page: int, room: float, cache: bool, queue: int, host: float, slowdown: float, depths: tuple[int, ...]
    ) -> None:
        num_pages, host_pages = int(CONTEXT * room) // page + 1, int(CONTEXT * host) // page
        layers = ("a", "b", "b", "a", "b")
        self.limits = Limits(
            3, 12, CONTEXT, K, num_pages, page, cache, queue, host_pages, depths, layers=layers, slowdown=slowdown
        )
        self.scheduler, self.device = Scheduler(self.limits), Device(self.limits)
        self.flight: Outcome | None = None
        self.flying: tuple[set[int], set[int], set[int]] | None = None
        self.now = 0.0
        self.count = 0
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @property
    def running(self) -> list[Sequence]:
        return list(self.scheduler._running.values())

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may, beyond those for whom a row is free and pages are not known to be short."""
        refused = self.scheduler._refused
        short = refused is not None and refused[0].state == "waiting"
        free = 0 if short else self.limits.max_running - self.scheduler.num_running
        return self.scheduler.num_waiting >= (self.limits.max_waiting or 0) + free

    @property
    def open(self) -> list[str]:
        return [name for name in self.requests if name not in self.ended]

    @rule(
        family=st.sampled_from(FAMILIES),
        same=st.one_of(st.integers(0, 45), st.integers(1, 28), st.integers(8, 28)),
        more=st.lists(st.integers(0, WORDS - 1), max_size=4),
        max_tokens=st.one_of(st.none(), st.integers(1, 10), st.integers(1, 45)),
        salt=st.sampled_from(("", "", "", "a")),
        priority=st.integers(0, 2),
        patience=st.one_of(st.none(), st.none(), st.integers(1, 30)),
    )
    def arrive(self, family, same, more, max_tokens, salt, priority, patience) -> None:
        self.submit(family[:same] + tuple(more), max_tokens, salt, priority, patience)

    @rule(pick=st.integers(0, 99), more=st.integers(0, WORDS - 1), max_tokens=st.integers(1, 6))
    def follow_up(self, pick: int, more: int, max_tokens: int) -> None:
        """The next turn of a conversation: what was said before, and a little more."""
        if self.requests:
            before = list(self.requests.values())[pick % len(self.requests)]
            prompt = before.prompt + tuple(token for token in self.said[before.id] if token != EOS) + (more,)
            self.submit(prompt[: CONTEXT - max_tokens], max_tokens, before.cache_salt, 0, None)

    def submit(self, prompt, max_tokens, salt, priority, patience) -> None:
        self.count += 1
        deadline = None if patience is None else self.now + patience
        params = SamplingParams(max_tokens=max_tokens)
        seed = self.count % 3 - 1
        name = f"r{self.count}"
        request = Request(name, prompt, params, (EOS,), seed, None, priority, deadline, salt)
        room = (self.limits.num_pages - 1) * self.limits.page_size + 1
        asked = len(prompt) + (max_tokens or 1)
        if not prompt or asked > min(CONTEXT, room):
            with pytest.raises(RequestError):
                self.scheduler.add(request)
        elif self.is_full:
            with pytest.raises(QueueFull):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests[name], self.said[name] = request, []
            limit = min(CONTEXT, room) - len(prompt) if max_tokens is None else max_tokens
            self.answers[name] = list(reference(prompt, seed, limit))

    @rule(luck=st.integers(0, 10**6), overlap=st.booleans(), count=st.integers(1, 5))
    def turn(self, luck: int, overlap: bool, count: int) -> None:
        self.turns(luck, overlap, count)

    @rule(luck=st.integers(0, 10**6), overlap=st.booleans())
    def turn_once(self, luck: int, overlap: bool) -> None:
        self.turns(luck, overlap, 1)

    def turns(self, luck: int, overlap: bool, count: int) -> None:
        for number in range(count):
            plan = self.scheduler.plan(self.now)
            rows = [extend.row for extend in plan.extends] + list(plan.decodes)
            assert len(rows) == len(set(rows)), "a row runs at most once per iteration"
            assert sum(len(e.tokens) for e in plan.extends) <= self.limits.chunk_tokens
            assert not (plan.is_empty and (plan.admits or plan.grants or plan.moves)), "an empty plan changes nothing"
            self.check_reclaimed(plan)
            launched = None if plan.is_empty else self.fly(plan, random.Random(luck + number))
            landing = [self.flight] if overlap else [self.flight, launched]
            self.flight = launched if overlap else None
            self.flying = self.flying if self.flight else None
            self.take(self.scheduler.take_ended())
            for outcome in landing:
                if outcome is not None:
                    self.take(self.scheduler.settle(outcome, random.Random(luck).choice((None, 0.5, 1, 2))))
            self.check()

    def check_reclaimed(self, plan: Plan) -> None:
        """What the iteration in the air may touch is granted to nobody, and what it may write is not even shared."""
        if self.flying is None or self.flight is None:
            return
        rows, touched, written = self.flying
        assert not {move.page for move in plan.moves if isinstance(move, Restore)} & touched
        for admit in plan.admits:
            start = next(extend.start for extend in plan.extends if extend.row == admit.row) // self.limits.page_size
            assert admit.row not in rows and not set(admit.pages[start:]) & touched and not set(admit.pages) & written
        for grant in plan.grants:
            assert not set(grant.pages) & touched

    def fly(self, plan: Plan, luck: random.Random) -> Outcome:
        lengths = {row: self.device.rows[row].length for row in self.device.rows}
        outcome = self.device.run(plan, luck)
        rows = {extend.row for extend in plan.extends} | set(plan.decodes)
        touched = {page for row in rows for page in self.device.rows[row].pages}
        written: set[int] = set()
        for extend in plan.extends:
            written |= self.device.writes(extend.row, extend.start, len(extend.tokens))
        for row in plan.decodes:
            written |= self.device.writes(row, lengths[row], K + 1)
        self.flying = rows, touched, written
        return outcome

    @rule(pick=st.integers(0, 99), verb=st.sampled_from(("abort", "preempt", "preempt")))
    def disturb(self, pick: int, verb: str) -> None:
        names = [sequence.request.id for sequence in self.running] or self.open
        if names:
            getattr(self.scheduler, verb)(names[pick % len(names)])
            self.take(self.scheduler.take_ended())

    @rule(count=st.sampled_from((0, 1, 3, 99)), seconds=st.integers(0, 3))
    def tidy(self, count: int, seconds: int) -> None:
        """Evicts some pages, or forgets all, and lets time pass."""
        self.now += seconds
        if count:
            self.scheduler.pages._reclaim(self.scheduler.pages.tree.evict(count))
        else:
            self.scheduler.flush_cache()
            assert not self.scheduler.pages.tree._roots

    def take(self, progress: list[Progress]) -> None:
        for entry in progress:
            name = entry.request_id
            assert name in self.requests and name not in self.ended, (
                "progress for a request that has ended or never was"
            )
            request, said, answer = self.requests[name], self.said[name], self.answers[name]
            said += entry.tokens
            assert said == answer[: len(said)], "other text than the request alone"
            if entry.finish_reason is not None:
                self.ended[name] = entry.finish_reason
            if entry.finish_reason in ("stop", "length"):
                assert said == answer, "a text that ends early"
                assert (entry.finish_reason == "stop") == (said[-1] == EOS)
            if entry.finish_reason == "deadline":
                assert request.deadline is not None and request.deadline <= self.now
            self.check_hit(request, entry.cached_tokens)

    def check_hit(self, request: Request, cached: int) -> None:
        """A hit is text that someone had before, under the same salt, with the token after it."""
        assert cached < len(request.prompt) and cached % self.limits.page_size == 0
        assert not cached or self.limits.prefix_cache
        if cached:
            texts = [
                other.prompt + tuple(self.answers[name])
                for name, other in self.requests.items()
                if other is not request and other.cache_salt == request.cache_salt
            ]
            assert max(shared(request.prompt, text) for text in texts) > cached

    def nodes(self) -> list[Node]:
        """All nodes: those that can be found, and detached ones that running requests still hold."""
        found: dict[int, Node] = {}
        pending = list(self.scheduler.pages.tree._roots.values())
        for sequence in self.running:
            assert sequence.holding is not None
            node: Node | None = sequence.holding.anchor
            while node is not None:
                pending.append(node)
                node = node.parent
        while pending:
            node = pending.pop()
            if id(node) not in found:
                found[id(node)] = node
                pending += node.children.values()
        return [node for node in found.values() if node.parent is not None]

    @invariant()
    def check(self) -> None:
        self.every_page_has_one_owner()
        self.every_slot_has_one_owner()
        self.nobody_can_write_what_is_shared()
        self.bounds_hold()

    def every_page_has_one_owner(self) -> None:
        pages, nodes = self.scheduler.pages, self.nodes()
        for pool in (pages.pool, self.scheduler.rows):
            assert pool.num_free + pool.num_quarantined + pool.num_granted == pool.capacity
        cached = [node.page for node in nodes if node.page]
        owned = [page for s in self.running for page in s.pages if page not in s.holding.borrowed]
        assert len(set(cached + owned)) == len(cached) + len(owned), "a page with two owners"
        assert pages.pool._granted == set(cached + owned)
        assert pages.num_cached == len(cached) and pages.tree.num_locked == sum(node.locks > 0 for node in nodes)
        for sequence in self.running:
            path = sequence.holding.anchor.pages()
            assert set(path) == sequence.holding.borrowed <= set(cached)
            assert sequence.pages[: len(path)] == path, "a locked page that the request does not use"

    def every_slot_has_one_owner(self) -> None:
        tree, nodes = self.scheduler.pages.tree, self.nodes()
        slots = [node.slot for node in nodes if node.slot]
        assert len(set(slots)) == len(slots) and tree.slots._granted == set(slots)
        assert not tree.slots.num_quarantined
        for node in nodes:
            assert (node.page == 0) != (node.slot == 0), "a page is in one place"
            assert node.page or not node.locks, "what is read is on the device"
            assert node.num_resident == sum(child.page != 0 for child in node.children.values())
            assert node.page or not node.num_resident, "what is below a page on the host is on the host too"

    def nobody_can_write_what_is_shared(self) -> None:
        cached = {node.page for node in self.nodes() if node.page}
        for sequence in self.running:
            row = self.device.rows[sequence.row]
            others = {page for other in self.running if other is not sequence for page in other.pages}
            if not row.done:
                assert not self.device.writes(sequence.row, row.length, CONTEXT) & (cached | others)

    def bounds_hold(self) -> None:
        for sequence in self.running:
            length = self.device.rows[sequence.row].length
            assert sequence.committed <= length
            assert sequence.in_flight <= (self.flight is not None)
            assert sequence.holding.anchor.depth * self.limits.page_size <= sequence.committed
            if sequence.state == "decoding":
                assert sequence.least_length <= length <= sequence.most_length(K, self.limits.page_size)

    def teardown(self) -> None:
        """Everything admitted ends, and every page and row comes home."""
        if not hasattr(self, "limits"):
            return
        for turns in range(1500):
            if not self.scheduler.has_work and self.flight is None:
                break
            self.turns(luck=turns, overlap=turns % 2 == 0, count=1)
        assert not self.open
        assert self.scheduler.pages.tree.num_locked == 0
        self.scheduler.flush_cache()
        for pool in (self.scheduler.pages.pool, self.scheduler.rows, self.scheduler.pages.tree.slots):
            assert pool.num_free == pool.capacity
        assert not self.scheduler.pages.tree._roots and not self.scheduler._launched


def test_five_thousand_events() -> None:
    machine_settings = settings(max_examples=60, stateful_step_count=85, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=machine_settings)


@pytest.mark.full
def test_a_hundred_thousand_events() -> None:
    machine_settings = settings(max_examples=700, stateful_step_count=150, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=machine_settings)
