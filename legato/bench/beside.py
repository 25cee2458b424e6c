"""What a prompt does to the requests that decode meanwhile, and they to it, on one rank's share: an engine as users run it.

Owns the requests and the figures of their iterations. Scheduler, loop and runner are the engine's own; exchanges loop back.
Called by `legato bench slice --prefill --beside`.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from legato.bench.share import Share
from legato.bench.steady import SliceError, Work
from legato.config import PAGE_SIZE, CacheConfig, Config, ExecutionConfig, Resolved, ScheduleConfig, resolve
from legato.engine.loop import Engine, Launched
from legato.engine.start import build_runner, limits_of
from legato.model.checkpoint import no_progress
from legato.plan import Outcome, Plan
from legato.runtime.runner import Runner
from legato.schedule import Request, Scheduler
from legato.types import SamplingParams

ALONE = 100
"""Iterations without a prompt, of which the median is what one takes alone; as many go before."""
ROOM = 1 << 15
"""Tokens that a request may decode meanwhile."""
WORST = 5
"""Iterations that are told one by one."""
SHORT_RUNS = 5
"""Prompts behind cached tokens, one after the other: what iterations cost is learnt from the first ones."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A prompt of `new` tokens behind `cached` ones, at most `chunk` in a pass (`None`: as an engine here), during which
    iterations take `slowdown` times as long at most."""

    new: int
    chunk: int | None
    slowdown: float
    cached: int = 0


@dataclass(slots=True)
class Turn:
    """One iteration: what was planned, the seconds that the scheduler expected of it, those that the host launched it for, and
    those from the end of the one before it to its own, by the device's clock where there is one."""

    plan: Plan
    expected: float | None
    host: float
    seconds: float = 0.0

    @property
    def fields(self) -> dict[str, Any]:
        """Where it was, and what was expected of it."""
        layers = self.plan.layers
        return {
            "layers": None if layers is None else [layers.start, layers.stop],
            "tokens_before": self.plan.extends[0].start,
            "expected_us": None if self.expected is None else 1e6 * self.expected,
            "us": 1e6 * self.seconds,
            "host_us": 1e6 * self.host,
        }


@dataclass(frozen=True, slots=True)
class BesideFigure:
    """Seconds. `alone`: of an iteration, median; `turns`: those that carried a part of a prompt; `first_tokens`: of each prompt,
    from its arrival."""

    alone: float
    turns: tuple[Turn, ...]
    first_tokens: tuple[float, ...]

    @property
    def first_token(self) -> float:
        """The median."""
        return statistics.median(self.first_tokens)

    def times(self, share: float) -> float:
        """What so large a share of the iterations keep to, in times `alone`."""
        ordered = sorted(turn.seconds for turn in self.turns)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] / self.alone

    @property
    def worst(self) -> list[Turn]:
        """Those that took longest."""
        return sorted(self.turns, key=lambda turn: -turn.seconds)[:WORST]

    def fields(self, share: Share, beside: Beside, work: Work, case: Mapping[str, Any]) -> dict[str, Any]:
        """As one line of a record, without the setting. `case`: what else tells figures apart."""
        return {
            "bench": "beside",
            "name": share.spec.name,
            "implementation": "engine",
            "case": {**share.fields, **case},
            **work.fields,
            "new_tokens": beside.new,
            "cached_tokens": beside.cached,
            "chunk_tokens": max(len(extend.tokens) for turn in self.turns for extend in turn.plan.extends),
            "slowdown": beside.slowdown,
            "alone_us": 1e6 * self.alone,
            "times_median": self.times(0.5),
            "times_p90": self.times(0.9),
            "times_p99": self.times(0.99),
            "times_most": self.times(1),
            "iterations": len(self.turns),
            "iterations_over": sum(turn.seconds > beside.slowdown * self.alone > 0 for turn in self.turns),
            "first_token_s": self.first_token,
            "first_tokens_s": list(self.first_tokens),
            "worst": [turn.fields for turn in self.worst],
            "correct": None,  # one rank's share: what the tokens are is the tests' business
        }


def measure_beside(share: Share, beside: Beside, work: Work, device: torch.device) -> BesideFigure:
    """Lets the requests of `work` decode, and a prompt arrive; several, one after the other, behind tokens that an earlier one
    has left in the cache.

    Raises:
        ConfigError: the engine refuses a setting, or the caches do not fit.
        SliceError: a request that decodes came to an end while it was timed.
    """
    settings = _settings(share, beside, work, device)
    runner = build_runner(share.spec, share.weights, settings, share.communicator, no_progress)
    scheduler = Scheduler(limits_of(settings, share.spec))
    watched = _Watched(runner, scheduler)
    engine = Engine(scheduler, watched, settings.overlap)
    told: set[str] = set()
    cached = _request("cached", beside.cached + 1, share, 1)
    prompts = [_request("prompt", beside.new, share, 1)]
    if beside.cached:
        prompts = [_behind(cached, index, beside.new, share) for index in range(SHORT_RUNS)]
    others = [_request(f"beside{index}", work.context, share) for index in range(work.batch)]
    first_tokens: list[float] = []
    gc.collect()
    gc.freeze()  # as a process that serves
    try:
        for request in others:
            engine.submit(request)
        _while(lambda: len(told) < work.batch, engine, told)
        if beside.cached:
            engine.submit(cached)
            _while(lambda: cached.id not in told, engine, told)
        watched.turns.clear()
        _while(lambda: len(watched.turns) < 2 * ALONE, engine, told)
        alone = statistics.median(turn.seconds for turn in watched.turns[ALONE:])
        for prompt in prompts:
            began = time.perf_counter()
            engine.submit(prompt)
            _while(lambda prompt=prompt: prompt.id not in told, engine, told)
            first_tokens.append(time.perf_counter() - began)
    finally:
        gc.unfreeze()
    turns = tuple(turn for turn in watched.turns if turn.plan.extends)
    return BesideFigure(alone, turns, tuple(first_tokens))


def _settings(share: Share, beside: Beside, work: Work, device: torch.device) -> Resolved:
    """Of an engine with room for all of them."""
    context = max(beside.cached + beside.new, work.context) + ROOM
    tokens = 2 * beside.cached + beside.new + work.batch * (work.context + ROOM) + PAGE_SIZE * (work.batch + 4)
    config = Config(
        num_drafts=work.num_drafts,
        cache=CacheConfig(tokens=max(tokens, context + PAGE_SIZE), latent=work.latent),  # type: ignore[arg-type]
        schedule=ScheduleConfig(work.batch + 1, beside.chunk, context, slowdown=beside.slowdown),
        execution=ExecutionConfig(device=str(device), ops=work.ops),
    )
    return resolve(
        config,
        max_position=max(share.spec.max_position, context),
        has_mtp=share.spec.has_mtp,
        cuda_available=torch.cuda.is_available(),
    )


def _request(name: str, num_tokens: int, share: Share, max_tokens: int | None = None) -> Request:
    """Greedy, of random tokens."""
    drawn = random.Random(name)
    prompt = tuple(drawn.randrange(share.spec.vocab_size) for _ in range(num_tokens))
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), (), 0)


def _behind(cached: Request, index: int, new: int, share: Share) -> Request:
    """A prompt that ends in `new` tokens which the cache has not. The first of them is the last of `cached`: the draft layer has
    seen a page's last token only together with the one behind it."""
    own = _request(f"prompt{index}", new - 1, share, 1)
    return replace(own, prompt=cached.prompt + own.prompt)


def _while(goes_on: Callable[[], bool], engine: Engine, told: set[str]) -> None:
    """Turns as long as that; `told` gains who has told a token. Raises SliceError if one ends that should decode meanwhile."""
    while goes_on():
        for progress in engine.turn():
            if progress.finish_reason is not None and progress.request_id.startswith("beside"):
                raise SliceError(f"{progress.request_id} came to an end while it was timed: {progress.finish_reason}")
            if progress.tokens:
                told.add(progress.request_id)


class _Watched:
    """A runner whose iterations are noted as they come back."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self.grammars, self.turns, self.landed_at = runner.grammars, list[Turn](), 0.0

    def check(self, params: SamplingParams) -> None:
        self._runner.check(params)

    def launch(self, plan: Plan) -> Launched:
        expected, began = self._scheduler.pace.expected(plan), time.perf_counter()
        flight = self._runner.launch(plan)
        return _Noted(plan, flight, Turn(plan, expected, time.perf_counter() - began), self)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A flight whose turn is noted when it lands."""

    plan: Plan
    flight: Launched
    turn: Turn
    watched: _Watched

    def outcome(self) -> Outcome:
        outcome, before = self.flight.outcome(), self.watched.landed_at
        self.watched.landed_at = time.perf_counter()
        self.turn.seconds = self.watched.landed_at - before if outcome.seconds is None else outcome.seconds
        self.watched.turns.append(self.turn)
        return outcome
