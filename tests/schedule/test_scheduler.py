"""The scheduler under random events, with a stand-in for the device: nothing is lost, shared, leaked or over-committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from legato.plan import Emission, Outcome, Plan
from legato.schedule import Limits, Pool, Progress, Request, RequestError, Scheduler
from legato.types import SamplingParams

K = 3
PAGE = 4
EOS = 99
LIMITS = Limits(max_running=3, chunk_tokens=12, context=40, num_drafts=K, num_pages=15, page_size=PAGE)


@dataclass
class Device:
    """Carries out plans as the runner would, with given acceptance: owns lengths, cuts at limits, freezes finished rows."""

    length: dict[int, int] = field(default_factory=dict)
    limit: dict[int, int] = field(default_factory=dict)
    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)
    done: dict[int, bool] = field(default_factory=dict)

    def run(self, plan: Plan, accepted: int, ends: bool) -> Outcome:
        emissions: list[Emission] = []
        for admit in plan.admits:
            self.limit[admit.row], self.pages[admit.row] = admit.max_length, admit.pages
            self.done[admit.row], self.length[admit.row] = False, 0
        for extend in plan.extends:
            assert extend.start == self.length[extend.row], "chunks follow each other without gap or overlap"
            self.length[extend.row] += len(extend.tokens)
            self.check_pages(extend.row, self.length[extend.row])
            if extend.next_token is None:
                emissions.append(self.emit(extend.row, 1, ends, 0))
        for row in plan.decodes:
            if not self.done[row]:
                self.check_pages(row, self.length[row] + K)
            emissions.append(self.emit(row, 0 if self.done[row] else accepted + 1, ends, K))
        return Outcome(plan.epoch, tuple(emissions))

    def emit(self, row: int, count: int, ends: bool, drafted: int) -> Emission:
        if self.done[row]:
            return Emission(row, (), True, 0, 0)
        count = min(count, self.limit[row] - self.length[row])
        tokens = [1] * count
        if ends:
            tokens[-1] = EOS
        self.length[row] += count
        self.done[row] = ends or self.length[row] >= self.limit[row]
        return Emission(row, tuple(tokens), self.done[row], count - 1, drafted)

    def check_pages(self, row: int, length: int) -> None:
        assert length <= len(self.pages[row]) * PAGE, "a row reaches past its pages"


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and turns in any order, with up to one flight in the air (overlap) or none."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.device = Scheduler(LIMITS), Device()
        self.flight: Outcome | None = None
        self.flying: Plan | None = None
        self.open: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.produced: dict[str, int] = {}
        self.count = 0

    @rule(prompt=st.integers(1, 45), max_tokens=st.one_of(st.none(), st.integers(1, 45)))
    def arrive(self, prompt: int, max_tokens: int | None) -> None:
        self.count += 1
        request = Request(f"r{self.count}", (1,) * prompt, SamplingParams(max_tokens=max_tokens), (EOS,), 0)
        fits = prompt < LIMITS.context and (max_tokens is None or prompt + max_tokens <= LIMITS.context)
        if not fits:
            with pytest.raises(RequestError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.open[request.id] = LIMITS.context - prompt if max_tokens is None else max_tokens

    @rule(accepted=st.integers(0, K), ends=st.booleans(), overlap=st.booleans())
    def turn(self, accepted: int, ends: bool, overlap: bool) -> None:
        plan = self.scheduler.plan()
        rows = [extend.row for extend in plan.extends] + list(plan.decodes)
        assert len(rows) == len(set(rows)), "a row runs at most once per iteration"
        assert sum(len(e.tokens) for e in plan.extends) <= LIMITS.chunk_tokens
        launched = None if plan.is_empty else self.device.run(plan, accepted, ends)
        landing = [self.flight] if overlap else [self.flight, launched]
        self.flight = launched if overlap else None
        self.take(self.scheduler.take_ended())
        for outcome in landing:
            if outcome is not None:
                self.take(self.scheduler.settle(outcome))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.open:
            self.scheduler.abort(data.draw(st.sampled_from(sorted(self.open))))
            self.take(self.scheduler.take_ended())

    def take(self, progress: list[Progress]) -> None:
        for entry in progress:
            assert entry.request_id in self.open, "progress for a request that has ended or never was"
            self.produced[entry.request_id] = self.produced.get(entry.request_id, 0) + len(entry.tokens)
            assert self.produced[entry.request_id] <= self.open[entry.request_id], "more tokens than allowed"
            if entry.finish_reason == "length":
                assert self.produced[entry.request_id] == self.open[entry.request_id]
            if entry.finish_reason is not None:
                self.ended[entry.request_id] = self.ended.get(entry.request_id, 0) + 1
                del self.open[entry.request_id]

    @invariant()
    def conserved(self) -> None:
        for pool in (self.scheduler.pages, self.scheduler.rows):
            assert pool.num_free + pool.num_quarantined + pool.num_granted == pool.capacity
        assert all(count == 1 for count in self.ended.values())

    def teardown(self) -> None:
        """Everything admitted ends, and every page and row comes home."""
        for _ in range(400):
            if not self.scheduler.has_work and self.flight is None:
                break
            self.turn(accepted=K, ends=False, overlap=False)
        assert not self.open
        for pool in (self.scheduler.pages, self.scheduler.rows):
            assert pool.num_free == pool.capacity


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)


def test_pages_come_back_only_after_their_last_flight() -> None:
    pool = Pool(4)
    pages = pool.take(3)
    assert pages is not None
    pool.give_back(pages, last_epoch=5)
    pool.settle(4)
    assert pool.num_free == 1
    pool.settle(5)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="not granted"):
        pool.give_back(pages, last_epoch=5)


def test_prompts_move_beside_running_requests() -> None:
    """Three rows decode 4 rows each: all 12 of the iteration. The waiting prompt still gets its quarter."""
    scheduler = Scheduler(Limits(max_running=4, chunk_tokens=12, context=40, num_drafts=3, num_pages=99, page_size=4))
    device = Device()
    for name in "abc":
        scheduler.add(Request(name, (1,), SamplingParams(max_tokens=30), (), 0))
    scheduler.settle(device.run(scheduler.plan(), 0, False))
    scheduler.add(Request("d", (1,) * 10, SamplingParams(max_tokens=2), (), 0))
    plan = scheduler.plan()
    assert len(plan.decodes) == 3
    assert [len(extend.tokens) for extend in plan.extends] == [3]
