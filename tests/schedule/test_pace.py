"""How far prompts go between iterations, and how many drafts those make: decided by what iterations took."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from legato.plan import Emission, Extend, Outcome, Plan
from legato.schedule import Limits, Request, Scheduler
from legato.schedule.depth import FORGOTTEN, Depths
from legato.schedule.pace import Pace
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
    assert pace.stop(0, 512, 3, 5) == 12, "more requests: at least as long as fewer"


def passes(pace: Pace, count: int, cost: Callable[[int], float], alone: float = 0.007) -> list[tuple[range, float]]:
    """So many passes of a prompt beside a request; each plan's layers and seconds."""
    found: list[tuple[range, float]] = []
    for _ in range(count):
        start = 0
        while start < LAYERS:
            layers = range(start, pace.stop(start, 512, 1, 5))
            ends = LAYERS + (layers.stop == LAYERS)
            seconds = alone + sum(cost(layer) for layer in range(start, layers.stop + ends - LAYERS))
            pace.observe(plan(1, 512, layers), seconds)
            found.append((layers, seconds))
            start = layers.stop
    return found


def uneven(layer: int) -> float:
    """Three cheap layers, every fourth with an indexer, and what comes behind them all."""
    return 0.0002 if layer < 3 else 0.004 if layer == LAYERS else 0.0018 if layer % 4 == 2 else 0.0009


def test_layers_of_different_cost_keep_to_the_bound_in_every_plan():
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.007)
    passes(pace, 5, uneven)
    settled = passes(pace, 2, uneven)
    assert max(seconds for _, seconds in settled) <= 0.014
    assert statistics.mean(seconds for _, seconds in settled) > 0.012, "and use what there is"


def test_costs_that_grow_are_followed():
    """Index scores take longer with every chunk."""
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.007)
    passes(pace, 5, uneven)
    plans = [some for chunk in range(40) for some in passes(pace, 1, partial(growing, 1 + chunk / 40))]
    seconds = sorted(some for _, some in plans)
    assert seconds[len(seconds) * 9 // 10] <= 0.014 and seconds[-1] <= 0.016


def growing(factor: float, layer: int) -> float:
    return uneven(layer) * (factor if layer % 4 == 2 else 1)


def test_an_iteration_that_is_late_once_slows_prompts_down_for_a_moment():
    pace = Pace(LAYERS, slowdown=2.0)
    for seconds in (0.007, 0.007, 0.085, 0.007, 0.012):  # in front of a prompt, and while memory was found for it
        pace.observe(plan(1), seconds)
    pace.observe(plan(1, 512, range(4)), 0.085)
    found = passes(pace, 1, lambda layer: 0.0005)
    assert [len(layers) for layers, _ in found[:6]] == [1, 1, 1, 1, 12, 12]
    assert max(seconds for _, seconds in found) <= 0.014


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


def test_tokens_of_an_iteration_are_estimated_draft_by_draft():
    depths = Depths((1, 2, 4))
    for _ in range(FORGOTTEN + 1):
        depths.observe(2, [2, 1, 0], 3, None)
    # Two of three first drafts were accepted, one of two second ones; later ones are taken to be as good as these.
    expected = {1: 1 + 2 / 3, 2: 1 + 2 / 3 + 1 / 3, 4: 1 + 2 / 3 + 1 / 3 + 1 / 6 + 1 / 12}
    assert {number: depths.accept_length(number) for number in expected} == pytest.approx(expected)


def test_the_smallest_number_that_is_enough():
    depths = Depths((1, 3, 5, 7))
    assert [depths.at_least(number) for number in (0, 1, 2, 3, 4, 7, 9)] == [1, 1, 3, 3, 5, 7, 7]
    assert depths.best(1) == 5, "the middle one, where nothing is known"


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


def test_a_pass_that_ends_half_way_is_dropped_by_a_plan_of_its_own():
    """Or what a device holds of it would stay there until somebody comes again."""
    scheduler = Scheduler(Limits(4, 64, 256, 5, 99, 16, num_layers=LAYERS, slowdown=2.0))
    settings = SamplingParams(max_tokens=50)
    scheduler.add(Request("decodes", (1, 2), settings, (), 0))
    first = scheduler.plan(0.0)
    scheduler.settle(Outcome(first.epoch, tuple(Emission(e.row, (5,), False, 0, 0) for e in first.extends)))
    scheduler.add(Request("long", (1,) * 60, settings, (), 0))
    half = scheduler.plan(0.0)
    assert half.layers == range(4) and not half.drops
    for name in ("decodes", "long"):
        scheduler.abort(name)
    last = scheduler.plan(0.0)
    assert last.drops and not last.is_empty and not last.extends and not last.decodes
    for plan in (half, last):
        scheduler.settle(Outcome(plan.epoch, ()))
    assert scheduler.plan(0.0).is_empty
