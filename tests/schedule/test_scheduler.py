"""The scheduler's rules one by one: fairness, growth, admission, preemption, priority, limits, deadlines, reuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from legato.plan import Outcome, Plan
from legato.schedule import Limits, Pool, Progress, QueueFull, Request, RequestError, Scheduler
from legato.types import SamplingParams
from tests.schedule.device import EOS, Device, reference

LIMITS = Limits(max_running=4, chunk_tokens=12, context=40, num_drafts=3, num_pages=99, page_size=4)
SEED = -3
WIDE = Limits(max_running=4, chunk_tokens=512, context=1024, num_drafts=7, num_pages=99, page_size=64)


class Bench:
    """A scheduler and a toy device, turned by hand; `overlap` as in the engine's loop."""

    def __init__(self, limits: Limits, overlap: bool = False) -> None:
        self.scheduler, self.device, self.overlap = Scheduler(limits), Device(limits), overlap
        self.flight: Outcome | None = None
        self.plans: list[Plan] = []
        self.progress: list[Progress] = []
        self.luck = random.Random(0)

    def add(self, name: str, prompt: int | tuple[int, ...], max_tokens: int | None = None, **more) -> None:
        prompt = (1,) * prompt if isinstance(prompt, int) else prompt
        self.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=max_tokens), (EOS,), SEED, **more))

    def turn(self, count: int = 1, now: float = 0.0) -> Plan:
        for _ in range(count):
            plan = self.scheduler.plan(now)
            self.plans.append(plan)
            launched = None if plan.is_empty else self.device.run(plan, self.luck)
            landing = [self.flight] if self.overlap else [launched]
            self.flight = launched if self.overlap else None
            self.progress += self.scheduler.take_ended()
            for outcome in landing:
                self.progress += [] if outcome is None else self.scheduler.settle(outcome)
        return self.plans[-1]

    def finish(self, now: float = 0.0) -> None:
        for _ in range(2000):
            if not (self.scheduler.has_work or self.flight):
                return
            self.turn(now=now)
        raise AssertionError("nothing ends")

    def running(self) -> list[str]:
        return sorted(sequence.request.id for sequence in self.scheduler._running.values())

    def text(self, name: str) -> list[int]:
        return [token for entry in self.progress if entry.request_id == name for token in entry.tokens]

    def end(self, name: str) -> str | None:
        (reason,) = [entry.finish_reason for entry in self.progress if entry.request_id == name and entry.finish_reason]
        return reason

    def cached(self, name: str) -> int:
        return next(entry.cached_tokens for entry in self.progress if entry.request_id == name)


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
    bench = Bench(LIMITS)
    for name in "abc":
        bench.add(name, 1, 30)
    bench.turn()
    bench.add("d", 10, 2)
    plan = bench.turn()
    assert len(plan.decodes) == 3
    assert [len(extend.tokens) for extend in plan.extends] == [3]


@pytest.mark.parametrize("overlap", [False, True])
def test_one_spare_page_is_enough(overlap: bool) -> None:
    """With pages to spare nothing ever stops at its capacity, and no request holds more than a page beyond its settled text."""
    bench = Bench(WIDE, overlap)
    for number, prompt in enumerate((1, 56, 57, 63, 64, 65, 128, 200)):
        bench.add(f"r{number}", prompt, 300)
    while bench.scheduler.has_work:
        bench.turn()
        for sequence in bench.scheduler._running.values():
            if sequence.state == "decoding" and len(sequence.text) > len(sequence.request.prompt):
                assert len(sequence.pages) <= (len(sequence.text) - 1) // 64 + 2
    for number, prompt in enumerate((1, 56, 57, 63, 64, 65, 128, 200)):
        assert bench.text(f"r{number}") == list(reference((1,) * prompt, SEED, 300))
    assert bench.scheduler.num_preemptions == bench.device.num_stalls == 0


def test_admission_leaves_a_page_for_everyone_who_runs() -> None:
    """8 pages. "a" holds 4 (12 tokens and K + 1 rows); "b" would need the other 4, and one must stay for "a" to grow into."""
    bench = Bench(replace(LIMITS, num_pages=9))
    bench.add("a", (1,) * 12, 20)
    bench.add("b", (2,) * 12, 4)
    bench.turn()
    assert bench.running() == ["a"]
    bench.finish()
    assert bench.scheduler.num_preemptions == 0 and bench.end("b") == "length"


def test_it_is_admitted_as_soon_as_pages_are_free() -> None:
    """12 pages: 3 for "long", 3 for "short", and "next" needs 6 while one must stay for "long"."""
    bench = Bench(replace(LIMITS, num_pages=13, chunk_tokens=64, prefix_cache=False))
    bench.add("long", 8, 32)
    bench.add("short", 12, 1)
    bench.add("next", 20, 4)
    bench.turn()
    assert bench.running() == ["long"] and bench.end("short") == "length" and bench.scheduler.num_waiting == 1
    bench.turn()
    assert bench.running() == ["long", "next"]


def test_one_refused_for_pages_in_quarantine_is_admitted_when_they_are_back() -> None:
    """12 pages, 4 of them held by "long". "short" has ended, but the iteration in the air may read its cached pages: evicting
    one of them for "next" does not free it yet. It waits for that iteration, and for nothing else."""
    bench = Bench(replace(LIMITS, num_pages=13, chunk_tokens=64), overlap=True)
    bench.add("long", (1,) * 8, 30)
    bench.add("short", (2,) * 12, 2)
    bench.add("next", (0,) * 16, 4)
    bench.turn(3)
    pages = bench.scheduler.pages
    assert bench.end("short") == "length" and pages.num_available == 7 and pages.pool.num_quarantined == 1
    plan = bench.scheduler.plan(0.0)
    assert not plan.admits and pages.counters.evicted_pages == 1 and pages.pool.num_quarantined == 2
    assert bench.scheduler._refused is not None, "it is not looked at again before something has become free"
    bench.flight, landed = bench.device.run(plan, bench.luck), bench.flight
    assert landed is not None
    bench.progress += bench.scheduler.settle(landed)
    assert pages.pool.num_quarantined == 0
    assert [admit.max_length for admit in bench.turn().admits] == [20]
    assert bench.running() == ["long", "next"]
    bench.finish()
    assert bench.end("next") == bench.end("long") == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_least_important_makes_room_and_says_nothing_twice(overlap: bool) -> None:
    """A pool of 1.2 requests: constant preemption, and every text is the text alone."""
    bench = Bench(replace(LIMITS, num_pages=13), overlap)
    prompts = {f"r{n}": tuple((n + i) % 3 for i in range(6)) for n in range(5)}
    for number, (name, prompt) in enumerate(prompts.items()):
        bench.add(name, prompt, priority=number % 2)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert bench.text(name) == list(reference(prompt, SEED, 34))


def test_the_most_important_is_never_preempted_for_another() -> None:
    bench = Bench(replace(LIMITS, num_pages=13))
    preempted: list[str] = []
    preempt = bench.scheduler._preempt
    bench.scheduler._preempt = lambda sequence: (preempted.append(sequence.request.id), preempt(sequence))
    bench.add("low", (0, 1, 2), priority=0)
    bench.add("high", (2, 1, 0), priority=1)
    bench.add("later", (2, 2, 0), priority=0)
    bench.finish()
    assert preempted and "high" not in preempted


@pytest.mark.parametrize("overlap", [False, True])
def test_preempting_the_only_request_does_not_stop_it(overlap: bool) -> None:
    bench = Bench(replace(LIMITS, num_pages=11), overlap)
    bench.add("a", 6)
    for _ in range(12):
        bench.turn()
        bench.scheduler.preempt("a")
        bench.turn()
    bench.finish()
    assert bench.text("a") == list(reference((1,) * 6, SEED, 34))


def test_priority_then_arrival() -> None:
    bench = Bench(replace(LIMITS, max_running=1))
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 1), ("e", 2)):
        bench.add(name, 3, 2, priority=priority)
    bench.finish()
    assert [entry.request_id for entry in bench.progress if entry.finish_reason] == ["c", "e", "d", "a", "b"]


def test_the_queue_has_a_limit() -> None:
    bench = Bench(replace(LIMITS, max_running=1, max_waiting=2))
    bench.add("a", 3, 9)
    bench.turn()
    bench.add("b", 3, 2)
    bench.add("c", 3, 2)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        bench.add("d", 3, 2)
    bench.finish()
    bench.add("d", 3, 2)
    bench.finish()
    assert [bench.end(name) for name in "abcd"] == ["length"] * 4


@pytest.mark.parametrize("most", [0, 3])
def test_what_can_run_at_once_does_not_wait(most: int) -> None:
    """Requests that arrive between two plans take the free rows first; only those behind them count as waiting."""
    bench = Bench(replace(LIMITS, max_running=4, max_waiting=most))
    names = [f"r{number}" for number in range(4 + most)]
    for name in names:
        bench.add(name, 3, 6)
    for _ in range(2):
        with pytest.raises(QueueFull, match=f"{most} requests wait already"):
            bench.add("late", 3, 2)
        bench.turn()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (4, most)
    bench.scheduler.abort(names[0])
    bench.add("early", 3, 2)
    with pytest.raises(QueueFull):
        bench.add("late", 3, 2)
    bench.finish()
    assert [bench.end(name) for name in (*names[1:], "early")] == ["length"] * (4 + most)


def test_free_rows_without_pages_are_no_room() -> None:
    bench = Bench(replace(LIMITS, max_running=4, max_waiting=1, num_pages=8))
    bench.add("a", 20, 4)
    bench.turn()
    bench.add("b", 20, 4)
    bench.turn()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    with pytest.raises(QueueFull):
        bench.add("c", 3, 2)
    bench.finish()
    for name in "cd":
        bench.add(name, 3, 2)
    bench.finish()
    assert [bench.end(name) for name in "abcd"] == ["length"] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_deadlines_end_what_waits_and_what_runs(overlap: bool) -> None:
    bench = Bench(replace(LIMITS, max_running=1, num_drafts=0), overlap)
    bench.add("runs", 3, 30, deadline=5.0)
    bench.add("waits", 3, 30, deadline=5.0)
    bench.add("has time", 3, 2, deadline=9.0)
    bench.turn(3, now=4.9)
    bench.finish(now=5.0)
    assert [bench.end(name) for name in ("runs", "waits", "has time")] == ["deadline", "deadline", "length"]
    assert 0 < len(bench.text("runs")) < 30 and not bench.text("waits")


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    bench = Bench(replace(LIMITS, num_pages=6))
    for prompt, max_tokens, message in (
        (0, 1, "no tokens"),
        (40, 1, "prompt is too long: 40 tokens > 39 maximum"),
        (30, 11, "maximum context length is 40 tokens; the prompt has 30 and max_tokens is 11"),
        (18, 4, "grow to 22 tokens; the cache holds 20"),
        (21, None, "the cache holds 20"),
    ):
        with pytest.raises(RequestError, match=message):
            bench.add("a", prompt, max_tokens)
    bench.add("a", 18, 3)
    bench.add("b", 20)
    bench.finish()
    assert len(bench.text("a")) == 3 and len(bench.text("b")) == 1


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("num_pages", [20, 300])
def test_a_growing_conversation_is_found_again(drafts: int, num_pages: int) -> None:
    """Ten turns that repeat what came before: all full pages but at most one are found, in 1.5 times its pages or many."""
    limits = replace(WIDE, context=2048, num_drafts=drafts, num_pages=num_pages)
    bench, text, before = Bench(limits), tuple(i % 3 for i in range(100)), 0
    for number in range(10):
        name = f"t{number}"
        bench.add(name, text, 40)
        bench.finish()
        assert bench.cached(name) >= (before - 1) // 64 * 64 - 64
        before = len(text) + len(bench.text(name))
        text += tuple(bench.text(name)) + tuple(range(3)) * 10


def test_siblings_share_up_to_the_page_before_they_part() -> None:
    bench = Bench(WIDE)
    stem = tuple(i % 3 for i in range(129))
    bench.add("stem", stem, 8)
    bench.finish()
    for cut, hit in ((63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128)):
        other = (stem[cut] + 1) % 3 if cut < 129 else 0
        bench.add(f"c{cut}", (*stem[:cut], other, 1, 1), 8)
        bench.finish()
        assert bench.cached(f"c{cut}") == hit, cut


def test_salts_and_flushes_and_switched_off() -> None:
    bench = Bench(WIDE)
    bench.add("a", 200, 4, cache_salt="x")
    bench.finish()
    bench.add("b", 200, 4, cache_salt="y")
    bench.add("c", 200, 4, cache_salt="x")
    bench.finish()
    assert [bench.cached(name) for name in "abc"] == [0, 0, 192]
    assert bench.scheduler.flush_cache() == 6
    bench.add("d", 200, 4, cache_salt="x")
    bench.finish()
    assert bench.cached("d") == 0
    off = Bench(replace(WIDE, prefix_cache=False))
    for name in "ab":
        off.add(name, 200, 4)
        off.finish()
    assert off.cached("b") == 0 and off.scheduler.pages.num_cached == 0


def test_an_aborted_prompt_leaves_what_was_settled() -> None:
    """Two chunks of 128 tokens have come back and a third is in the air: four pages can be found, not six."""
    bench = Bench(replace(WIDE, chunk_tokens=128), overlap=True)
    bench.add("a", 400, 4)
    bench.turn(3)
    bench.scheduler.abort("a")
    bench.turn(2)
    bench.add("b", 400, 4)
    bench.finish()
    assert bench.end("a") == "abort" and bench.cached("b") == 256


def test_prompt_logprobs_run_the_whole_prompt() -> None:
    bench = Bench(WIDE)
    bench.add("a", 200, 4)
    bench.finish()
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    bench.scheduler.add(Request("b", (1,) * 200, params, (EOS,), 3))
    bench.finish()
    assert bench.cached("b") == 0
