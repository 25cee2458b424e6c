"""How far prompts go between iterations, and how many drafts those make: decided by what iterations took."""

from __future__ import annotations

import random
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

LAYERS = tuple("dense" if layer < 3 else "full" if layer % 4 == 2 else "shared" for layer in range(78))
END = len(LAYERS)
"""What comes behind them, as a layer."""


def chunk(rows: int, end: bool = False) -> tuple[Extend, ...]:
    """So many rows of a prompt that goes on behind them, or not."""
    return (Extend(9, 0, (1,) * rows, None if end else 2),)


def plan(num_decoding: int, rows: int = 0, layers: range | None = None, end: bool = False) -> Plan:
    extends = chunk(rows, end) if rows else ()
    return Plan(0, (), extends, tuple(range(1, num_decoding + 1)), num_drafts=5, layers=layers)


def test_a_prompt_takes_as_long_as_the_others_take_alone():
    pace = Pace(LAYERS, slowdown=2.0)
    assert pace.stop(0, chunk(512), 1, 5) == 1, "little, before anything is known"
    for _ in range(20):
        pace.observe(plan(1), 0.007)
        pace.observe(plan(1, 512, range(8)), 0.007 + 8 * 0.0005)
        pace.observe(plan(1, 512, range(4, 16)), 0.007 + 12 * 0.0005)
        pace.observe(plan(1, 512, range(70, END)), 0.007 + 8 * 0.0005)
    assert pace.stop(0, chunk(512), 1, 5) == 13, "at half a millisecond a layer, and surely"
    assert pace.stop(60, chunk(512), 1, 5) == 73 and pace.stop(70, chunk(512), 1, 5) == END + 1, "the end is two layers"
    assert pace.stop(66, chunk(512), 1, 5) == END, "and has a plan of its own where it does not fit"
    assert pace.stop(END, chunk(512), 1, 5) == END + 1
    assert pace.stop(0, chunk(512), 1, 4) == 1, "another iteration"
    assert pace.stop(0, chunk(512), 3, 5) == 13, "more requests: at least as long as fewer"
    assert pace.stop(0, chunk(2048), 1, 5) == 3, "more rows: at most in proportion"
    assert pace.stop(0, chunk(100), 1, 5) == 13, "fewer rows: no longer"


def test_what_is_less_sure_gets_less():
    pace, surer = Pace(LAYERS, slowdown=2.0), Pace(LAYERS, slowdown=2.0)
    for _ in range(20):
        for one in (pace, surer):
            one.observe(plan(1), 0.007)
            one.observe(plan(1, 512, range(8)), 0.007 + 8 * 0.0005)  # what these take together, and not which of them
        surer.observe(plan(1, 512, range(6)), 0.007 + 6 * 0.0005)
        surer.observe(plan(1, 512, range(3, 6)), 0.007 + 3 * 0.0005)
    layers = plan(1, 512, range(3, 16))
    assert pace.expected(layers) == pytest.approx(surer.expected(layers), rel=0.01)
    assert pace.stop(3, chunk(512), 1, 5) < surer.stop(3, chunk(512), 1, 5)


def test_the_first_plan_of_a_prompt_is_one_layer():
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.007)
    assert pace.stop(0, chunk(512), 1, 5) == 1 and pace.expected(plan(1, 512, range(1))) is None
    pace.observe(plan(1, 512, range(1)), 0.007 + 0.002)
    assert pace.stop(1, chunk(512), 1, 5) == 2, "and others are taken to cost twice as much"
    pace.observe(plan(1, 512, range(1, 2)), 0.007 + 0.002)
    pace.observe(plan(1, 512, range(2, 4)), 0.007 + 0.003)
    assert pace.expected(plan(1, 512, range(1, 5))) == pytest.approx(0.007 + 2 * 0.002 + 2 * 0.001)
    assert pace.expected(plan(1)) == pytest.approx(0.007) and pace.expected(plan(1, 0, None)) == pytest.approx(0.007)


def test_what_was_never_seen_alone_goes_alone_first():
    pace = Pace(LAYERS, slowdown=2.0)
    assert not pace.goes_alone(0, 5)
    assert [pace.goes_alone(1, 5) for _ in range(2)] == [True, True], "one is in the air when the next is made"
    pace.observe(plan(1), 0.007)
    assert not pace.goes_alone(1, 5) and pace.goes_alone(2, 5) and pace.goes_alone(1, 3)
    assert [pace.goes_alone(9, 5) for _ in range(6)] == [True] * 4 + [False] * 2, "not for ever"
    assert not Pace(LAYERS, 0.0).goes_alone(1, 5)


def test_what_came_late_when_alone_is_timed_again():
    """Or a prompt would go one layer at a time for as long as others decode: no plan takes longer than what is believed."""
    pace = Pace(LAYERS, slowdown=2.0)
    assert pace.goes_alone(2, 5)
    pace.observe(plan(2), 0.080)  # of an iteration that takes 7 ms
    assert not pace.goes_alone(2, 5)
    pace.observe(plan(2, 512, range(1)), 0.008)
    assert pace.goes_alone(2, 5) and pace.stop(1, chunk(512), 2, 5) == 2
    pace.observe(plan(2), 0.007)
    pace.observe(plan(2, 512, range(1)), 0.0068)
    assert not pace.goes_alone(2, 5), "a layer that costs next to nothing, and scatter"
    for start in range(1, 9):
        pace.observe(plan(2, 512, range(start, start + 1)), 0.008)
    pace.observe(plan(2, 512, range(9, 10)), 0.0069)
    assert not pace.goes_alone(2, 5), "costs are known: now it is this plan that was quick"
    assert pace.stop(9, chunk(512), 2, 5) > 12


def test_layers_of_one_kind_teach_each_other():
    """Where a plan ends changes from pass to pass: what its layers took together says what other plans will take."""
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.007)
    for _ in range(20):
        pace.observe(plan(1, 512, range(6, 8)), 0.007 + 0.0035 + 0.002)  # one with an indexer, one without
        pace.observe(plan(1, 512, range(7, 10)), 0.007 + 3 * 0.002)
    assert pace.expected(plan(1, 512, range(50, 51))) == pytest.approx(0.0105, rel=0.01), "with an indexer"
    assert pace.expected(plan(1, 512, range(51, 53))) == pytest.approx(0.011, rel=0.01)


def passes(pace: Pace, count: int, cost: Callable[[int], float], alone: float = 0.007) -> list[tuple[range, float]]:
    """So many passes of a prompt beside a request, of which one plan is in the air while the next is made; each plan's layers
    and seconds."""
    found: list[tuple[range, float]] = []
    told = 0
    for _ in range(count):
        start = 0
        while start < pace.end:
            layers = range(start, pace.stop(start, chunk(2048), 1, 5))
            found.append((layers, alone + sum(map(cost, layers))))
            for before, seconds in found[told:-1]:
                pace.observe(plan(1, 2048, before), seconds)
            told = len(found) - 1
            start = layers.stop
    for before, seconds in found[told:]:
        pace.observe(plan(1, 2048, before), seconds)
    return found


def uneven(layer: int, growth: float = 0.0) -> float:
    """As on an H200: index scores grow with every chunk, and the end is a layer with an indexer and more."""
    if layer == END:
        return 0.0035 + growth
    return {"dense": 0.0021 + growth, "full": 0.0025 + growth, "shared": 0.0019}[LAYERS[layer]]


@pytest.mark.parametrize("alone", [0.0056, 0.0062, 0.0072, 0.009])
def test_every_plan_keeps_to_the_bound(alone: float):
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), alone)
    plans = [some for chunk in range(40) for some in passes(pace, 1, partial(uneven, growth=chunk * 3e-5), alone)]
    assert max(seconds for _, seconds in plans) <= 2.02 * alone, "the first ones too"
    assert sum(seconds > 2 * alone for _, seconds in plans) <= 2
    assert statistics.mean(seconds for _, seconds in plans) > 1.65 * alone, "as far as whole layers allow"


@pytest.mark.parametrize(("alone", "more"), [(0.0060, 7e-5), (0.0132, 6e-5)])
def test_kinds_that_grow_apart_are_told_apart(alone: float, more: float):
    """Layers with an indexer cost more with every chunk, the others do not; plans scatter by 2 %. A cost that all kinds are
    corrected by in proportion leaves every plan with one indexer more too long."""
    drawn = random.Random(0)
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), alone)

    def cost(layer: int, chunk: int) -> float:
        return (uneven(layer) + (0.0 if LAYERS[layer : layer + 1] == ("shared",) else chunk * more)) * drawn.gauss(
            1, 0.02
        )

    plans = [some for chunk in range(40) for some in passes(pace, 1, partial(cost, chunk=chunk), alone)]
    assert sum(seconds > 2 * alone for _, seconds in plans) <= 0.01 * len(plans)
    assert statistics.mean(seconds for _, seconds in plans) > 1.65 * alone


def test_an_iteration_that_is_late_once_slows_prompts_down_for_a_moment():
    pace = Pace(LAYERS, slowdown=2.0)
    for seconds in (0.007, 0.007, 0.085, 0.007, 0.012):  # in front of a prompt, and while memory was found for it
        pace.observe(plan(1), seconds)
    pace.observe(plan(1, 2048, range(4)), 0.085)
    found = passes(pace, 1, lambda layer: 0.0005)
    assert [len(layers) for layers, _ in found[:5]] == [1] * 5 and len(found[5][0]) >= 4 and len(found[6][0]) >= 10
    assert max(seconds for _, seconds in found) <= 0.014


def test_what_costs_change_to_is_believed_at_once_but_not_all_that_is_late():
    pace = Pace(LAYERS, slowdown=2.0)
    layers = plan(1, 16, range(3, 43))
    pace.observe(plan(1), 0.006)
    for cost in [0.00007] * 20 + [0.00014] * 2:
        pace.observe(layers, 0.006 + 40 * cost)
    assert pace.expected(layers) == pytest.approx(0.0116, rel=0.02), (
        "twice what it was: as after any other number of rows"
    )
    pace.observe(layers, 0.085)
    assert (pace.expected(layers) or 1) < 0.025
    pace.observe(layers, 0.0116)
    assert pace.expected(layers) == pytest.approx(0.0116, rel=0.1)


def test_a_kind_that_was_taken_as_too_cheap_is_found():
    """Not the dear ones beside it, which the next plans would correct back."""
    drawn, pace = random.Random(1), Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.006)

    def cost(layer: int) -> float:
        return uneven(layer) * drawn.gauss(1, 0.02)

    passes(pace, 5, cost, alone=0.006)
    known = pace._passes[False, 2048]
    known.costs["end"] = 0.0005
    for pair in [pair for pair in known.covariance if "end" in pair]:
        known.covariance[pair] = (0.1 * 0.0005) ** 2 if pair == ("end", "end") else 0.0
    most = [max(seconds for _, seconds in passes(pace, 1, cost, alone=0.006)) / 0.006 for _ in range(6)]
    assert most[0] > 2.05 and max(most[2:]) < 2.02, most


def test_of_a_kind_s_cost_something_is_left():
    pace = Pace(LAYERS, slowdown=2.0)
    pace.observe(plan(1), 0.006)
    for layers in (range(3, 7), range(3, 6), range(6, 7)):
        pace.observe(plan(1, 512, layers), 0.006 + len(layers) * 0.001)
    for _ in range(10):
        pace.observe(plan(1, 512, range(3, 7)), 0.006 + 1e-15)
    assert all(cost > 0 for cost in pace._passes[False, 512].costs.values())


def test_ends_that_are_graphs_stop_where_graphs_do():
    pace = Pace(LAYERS, 2.0, end_rows=64, end_layers=8)
    assert pace.stop(0, chunk(13, end=True), 1, 5) == 8, "the least, before anything is known"
    assert pace.stop(0, chunk(65, end=True), 1, 5) == 1 and pace.stop(0, chunk(13), 1, 5) == 1, "no graphs"
    pace.observe(plan(1), 0.006)
    pace.observe(plan(1, 13, range(8), end=True), 0.006 + 8 * 0.00014)
    pace.observe(plan(1, 13, range(8, 16), end=True), 0.006 + 8 * 0.00014)
    assert pace.stop(16, chunk(16, end=True), 1, 5) == 56, "40 layers, of about 41 that fit"
    assert pace.stop(56, chunk(16, end=True), 1, 5) == END + 1
    assert pace.stop(0, chunk(16), 1, 5) == 39, "single layers, of which the others are all that is known"
    assert pace.stop(0, chunk(40, end=True), 1, 5) == 8, (
        "four times as many rows: four times as long, for all one knows"
    )
    pace.observe(plan(1, 2048, range(3)), 0.006 + 3 * 0.002)
    assert pace.stop(0, chunk(16, end=True), 1, 5) == 32, "what chunks cost says nothing of ends any more"
    two = chunk(8, end=True) * 2
    assert pace.stop(0, two, 1, 5) % 8, "two prompts that end are no graphs"
    assert [pace.stop(start, chunk(64, end=True), 1, 5) for start in (64, 72, END)] == [72, END + 1, END + 1]


@pytest.mark.parametrize("start", range(END + 1))
def test_every_pass_ends(start: int):
    pace = Pace(LAYERS, slowdown=1.1)
    pace.observe(plan(1), 0.001)
    pace.observe(plan(1, 512, range(1)), 1.0)
    assert start < pace.stop(start, chunk(512), 1, 5) <= pace.end


def test_nothing_is_cut_without_a_bound():
    assert not Pace(LAYERS, 0.0).cuts and not Pace(("",), 2.0).cuts


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
    scheduler = Scheduler(Limits(4, 64, 256, 5, 99, 16, layers=LAYERS, slowdown=2.0))
    settings = SamplingParams(max_tokens=50)
    scheduler.add(Request("decodes", (1, 2), settings, (), 0))
    first = scheduler.plan(0.0)
    scheduler.settle(Outcome(first.epoch, tuple(Emission(e.row, (5,), False, 0, 0) for e in first.extends)))
    scheduler.add(Request("long", (1,) * 60, settings, (), 0))
    half = scheduler.plan(0.0)
    while not half.extends:  # decodes alone first
        scheduler.settle(Outcome(half.epoch, ()), 0.007)
        half = scheduler.plan(0.0)
    assert half.layers == range(1) and not half.drops
    for name in ("decodes", "long"):
        scheduler.abort(name)
    last = scheduler.plan(0.0)
    assert last.drops and not last.is_empty and not last.extends and not last.decodes
    for plan in (half, last):
        scheduler.settle(Outcome(plan.epoch, ()))
    assert scheduler.plan(0.0).is_empty
