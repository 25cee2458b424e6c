"""How far prompts go between iterations, and how many drafts those make: decided by what iterations took."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from legato.plan import Emission, Extend, Outcome, Plan
from legato.schedule import Limits, Request, Scheduler
from legato.schedule.depth import Depths
from legato.schedule.pace import TAIL_LAYERS, Pace
from legato.types import SamplingParams

LAYERS = 78


def plan(num_decoding: int, rows: int = 0, layers: range | None = None) -> Plan:
    extends = (Extend(9, 0, (1,) * rows, 2),) if rows else ()
    return Plan(0, (), extends, tuple(range(1, num_decoding + 1)), num_drafts=5, layers=layers)


def test_a_prompt_takes_as_long_as_the_others_take_alone():
    pace = Pace(LAYERS, slowdown=2.0)
    assert pace.stop(0, 512, 1, 5) == 4, "little, before anything is known"
    for _ in range(20):
        pace.observe(plan(1), 0.007)
        pace.observe(plan(1, 512, range(4, 8)), 0.007 + 4 * 0.0005)
    assert pace.stop(0, 512, 1, 5) == 12, "0.9 of 7 ms, at half a millisecond a layer"
    assert pace.stop(60, 512, 1, 5) == 72 and pace.stop(72, 512, 1, 5) == LAYERS
    assert pace.stop(67, 512, 1, 5) == LAYERS - 1, "what comes behind the layers has a plan of its own"
    assert pace.stop(0, 512, 1, 4) == 4, "another iteration"


def test_the_end_of_the_layers_costs_more():
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.007)
    pace.observe(plan(1, 512, range(74, LAYERS)), 0.007 + (4 + TAIL_LAYERS) * 0.001)
    assert pace.stop(0, 512, 1, 5) == 6


@pytest.mark.parametrize("start", range(LAYERS))
def test_every_pass_ends(start: int):
    pace = Pace(LAYERS, slowdown=1.1)
    pace.observe(plan(1), 0.001)
    pace.observe(plan(1, 512, range(1)), 1.0)
    assert start < pace.stop(start, 512, 1, 5) <= LAYERS


def test_nothing_is_cut_without_a_bound():
    assert not Pace(LAYERS, 0.0).cuts and not Pace(1, 2.0).cuts


@dataclass
class Machine:
    """Iterations that take a second per draft and 4 more; drafts that are accepted up to `agrees`."""

    depths: Depths
    agrees: int
    chosen: list[int] = field(default_factory=list)

    def run(self, count: int, num_requests: int = 1, base: float = 4.0) -> int:
        for _ in range(count):
            drafts = self.depths.choose(num_requests)
            self.chosen.append(drafts)
            self.depths.observe(drafts, [min(self.agrees, drafts)] * num_requests, num_requests, base + drafts)
        return self.depths.best(num_requests)


def test_the_number_of_drafts_follows_what_is_accepted():
    machine = Machine(Depths((1, 3, 5, 7)), agrees=7)
    assert machine.run(60) == 7, "8 tokens in 11 s"
    assert set(machine.chosen) == {1, 3, 5, 7}, "all have been tried"
    machine.agrees = 1
    assert machine.run(3000) == 1, "2 tokens in 5 s, not in 7"
    assert machine.chosen[-100:].count(1) >= 80, "and now and then a neighbour is tried"
    assert machine.depths.accept_length(7) == pytest.approx(2, abs=0.05)


def test_batches_of_another_size_are_measured_apart():
    machine = Machine(Depths((1, 3)), agrees=3)
    assert machine.run(40, num_requests=1) == 3
    assert machine.run(80, num_requests=16, base=0.1) == 1, "2 tokens in 1.1 s, not 4 in 3.1"
    assert machine.depths.best(1) == 3


def test_one_number_is_no_choice():
    machine = Machine(Depths((5,)), agrees=0)
    machine.run(10)
    assert machine.chosen == [5] * 10


LIMITS = Limits(4, 64, 256, 7, 99, 16, depths=(1, 3, 5, 7))


@pytest.mark.parametrize(
    ("asked", "found"), [((2,), 3), ((0,), 1), ((7, 1), 7), ((6, None), 7), ((None,), 7), ((9,), 7)]
)
def test_requests_may_ask_for_a_number(asked: tuple[int | None, ...], found: int):
    scheduler = Scheduler(LIMITS)
    for index, number in enumerate(asked):
        scheduler.add(Request(f"r{index}", (1, 2), SamplingParams(max_tokens=50), (), index, number))
    first = scheduler.plan(0.0)
    scheduler.settle(Outcome(first.epoch, tuple(Emission(e.row, (5,), False, 0, 0) for e in first.extends)))
    assert scheduler.plan(0.0).num_drafts == found
