"""The soak's books, on a stand-in for the device: a clean run is clean, and each fault that it looks for is found."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from legato.bench.overhead import InstantRunner
from legato.bench.soak import CACHE_TOKENS, CONTEXT, HOST_TOKENS, SENTINEL, Load, Soak
from legato.engine.loop import Engine
from legato.schedule import Limits, Scheduler

pytestmark = pytest.mark.full

K = 3


@pytest.fixture
def soak() -> Soak:
    limits = Limits(6, 128, CONTEXT, K, CACHE_TOKENS // 64 + 1, 64, max_waiting=12, host_pages=HOST_TOKENS // 64)
    engine = Engine(Scheduler(limits), InstantRunner(K), overlap=True)
    draw = random.Random(1)
    prompts = [tuple(draw.randrange(1000) for _ in range(400)) for _ in range(4)]
    return Soak(SimpleNamespace(engine=engine), Load(prompts, (5, 6), 0), 0)


def soaked(soak: Soak, turns: int = 3000) -> Soak:
    for _ in range(turns):
        soak.turn(arrivals=True)
    while soak.engine.has_work:
        soak.turn(arrivals=False)
    return soak


def test_everything_happens_and_everything_comes_back(soak: Soak) -> None:
    ledger, stats = soaked(soak).ledger, soak.engine.stats
    assert ledger.wrong == [] and soak.at_rest() == []
    assert ledger.kinds[SENTINEL] > 10 and ledger.kinds["regex"] and ledger.kinds["json_schema"] and ledger.refused
    assert sum(ledger.ends.values()) == sum(ledger.kinds.values()) and ledger.ends["abort"] and ledger.ends["length"]
    assert stats.preemptions and stats.evicted_pages and stats.host_hit_tokens and stats.host_evicted_pages


def test_what_is_held_is_said(soak: Soak) -> None:
    scheduler = soaked(soak, 50).engine._scheduler
    assert scheduler.rows.take(2) and scheduler.pages.pool.take(1) and scheduler.pages.tree.slots.take(3)
    assert soak.at_rest() == ["2 rows still held", "1 pages still held", "3 host slots still held"]


def test_another_answer_to_the_same_question_is_a_fault(soak: Soak) -> None:
    soaked(soak, 200)
    assert soak._answer
    soak._answer = [0, *soak._answer[1:]]
    assert any("another answer" in fault for fault in soaked(soak, 200).ledger.wrong)
