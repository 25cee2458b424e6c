"""The orders that are kept in heaps, through the sweeps that throw stale entries away."""

from __future__ import annotations

import random
from dataclasses import dataclass

from legato.schedule import Request
from legato.schedule.queue import Deadlines
from legato.schedule.recency import Recency
from legato.schedule.request import Sequence
from legato.types import SamplingParams


def sequence(number: int, deadline: float | None) -> Sequence:
    request = Request(f"r{number}", (1,), SamplingParams(), (), 0, deadline=deadline)
    return Sequence(request, (0, number), 8, [1])


def test_deadlines_come_in_their_order_however_many_ended_before() -> None:
    draw = random.Random(0)
    deadlines, everyone = Deadlines(), [sequence(number, draw.uniform(0, 100)) for number in range(400)]
    for number, one in enumerate(everyone):
        deadlines.add(one)
        if number % 4:
            one.state = "finished"
    deadlines.add(sequence(999, None))
    is_open = sorted((one for one in everyone if one.state != "finished"), key=lambda one: one.request.deadline or 0.0)
    assert len(deadlines._heap) < 300, "entries of those that have ended are thrown away on the way"
    half = len(is_open) // 2
    now = is_open[half].request.deadline
    assert now is not None
    assert list(deadlines.expired(now)) == is_open[: half + 1]
    assert list(deadlines.expired(now)) == []
    assert list(deadlines.expired(1e9)) == is_open[half + 1 :]


@dataclass
class Thing:
    last_use: int
    may_go: bool = True


def test_the_least_recent_goes_first_however_often_others_were_used() -> None:
    draw = random.Random(1)
    recency: Recency[Thing] = Recency(lambda thing: thing.may_go)
    things = [Thing(use) for use in range(20)]
    for use in range(20, 700):
        thing = draw.choice(things)
        thing.last_use = use
        recency.offer(thing, len(things))
        recency.offer(draw.choice(things), len(things))  # again, and late
    things[3].may_go = things[11].may_go = False
    left = sorted((thing for thing in things if thing.may_go), key=lambda thing: thing.last_use)
    assert len(recency) < 700, "entries that something later has made stale are thrown away on the way"
    for expected in left:
        assert recency.pop() is expected
        expected.may_go = False
    assert recency.pop() is None
    recency.offer(things[3], len(things))
    assert recency.pop() is None, "what may not go is not offered"
