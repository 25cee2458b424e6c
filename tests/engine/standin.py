"""What a process serves in tests: the real loop, scheduler and messages around a toy device, which is up in half a second.

Its faults are asked for by prompt or by the name of the function that builds it, so production code has no place for tests.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from legato.config import CacheConfig, Config, ConfigError, ScheduleConfig
from legato.engine import serving
from legato.engine.loop import Engine
from legato.engine.messages import EngineInfo
from legato.engine.serving import OnProgress, Served
from legato.plan import Outcome, Plan
from legato.schedule import Limits, Progress, Scheduler
from legato.server.engine.client import EngineClient, GenerationRequest
from legato.types import SamplingParams
from tests.schedule.device import EOS, Device, reference

PAGE = 4
CONTEXT = 52
DRAFTS = 3
VOCABULARY = 1000
RAISES, SLEEPS, CRASHES = 901, 902, 903
"""Tokens of a prompt that make the device fail when it runs them."""
OUTGROWS = "a grammar that breaks the compiler"
SLOW = "a grammar that is compiled when there is a file "
"""And then the file's path."""
ROOMY: dict[str, Any] = {"context": 20_000, "tokens": 80_000}
"""Settings for requests that are `endless`."""


@dataclass(frozen=True)
class Landed:
    plan: Plan
    landed: Outcome

    def outcome(self) -> Outcome:
        return self.landed


class ToyRunner:
    """Each iteration takes at least `pace_s` seconds."""

    def __init__(self, limits: Limits, pace_s: float) -> None:
        self.grammars = None
        self._device, self._luck, self._pace_s = Device(limits), random.Random(0), pace_s

    def check(self, params: SamplingParams) -> None:
        if params.grammar is not None and params.grammar.startswith(SLOW):
            while not Path(params.grammar.removeprefix(SLOW)).exists():
                time.sleep(0.005)
        if params.grammar == OUTGROWS:
            raise ZeroDivisionError("no such production")

    def launch(self, plan: Plan) -> Landed:
        tokens = {token for extend in plan.extends for token in extend.tokens}
        if RAISES in tokens:
            raise MemoryError("out of memory on the device")
        if SLEEPS in tokens:
            time.sleep(3600)
        if CRASHES in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(self._pace_s)
        return Landed(plan, self._device.run(plan, self._luck))


class Livelocked(Engine):
    """It turns and turns, and nobody gets anything."""

    def turn(self) -> list[Progress]:
        self.is_stuck = True
        return []


class NoProfiler:
    def start(self, folder: str) -> None:
        raise RuntimeError("nothing to record")

    def stop(self) -> str:
        raise RuntimeError("nothing was recorded")


def assemble(config: Config, progress: OnProgress, engine: type[Engine] = Engine) -> Served:
    """`config.model` is the pace: least seconds per iteration."""
    schedule = config.schedule
    limits = Limits(
        max_running=schedule.max_running,
        chunk_tokens=schedule.chunk_tokens or 512,
        context=schedule.context or CONTEXT,
        num_drafts=DRAFTS,
        num_pages=(config.cache.tokens or 2048) // PAGE + 1,
        page_size=PAGE,
        prefix_cache=config.cache.prefix,
        max_waiting=schedule.max_waiting,
    )
    progress(1, 1, "toy")
    built = engine(Scheduler(limits), ToyRunner(limits, float(config.model or 0)), config.execution.overlap == "on")
    info = EngineInfo(
        "toy", "", "none", limits.context, 2048, DRAFTS, limits.max_running, VOCABULARY, 0.0, "none", "none"
    )
    return Served(built, info, NoProfiler())


def talkative(config: Config, progress: OnProgress) -> Served:
    """It reports ten times a second, so that silence is told from a machine that others use."""
    serving.REPORT_S = serving.IDLE_REPORT_S = 0.1
    return assemble(config, progress)


def livelocked(config: Config, progress: OnProgress) -> Served:
    return assemble(config, progress, Livelocked)


def misconfigured(config: Config, progress: OnProgress) -> Served:
    raise ConfigError("context 9 is longer than the 8 tokens the checkpoint states")


def loading_raises(config: Config, progress: OnProgress) -> Served:
    raise KeyError("model.layers.3")


def loading_exits(config: Config, progress: OnProgress) -> Served:
    os._exit(3)


def loading_forever(config: Config, progress: OnProgress) -> NoReturn:
    time.sleep(3600)
    raise AssertionError


def babbling(config: Config, progress: OnProgress) -> NoReturn:
    """Writes what is no message to the socket whose number the command line holds."""
    os.write(int(sys.argv[1]), b"\0\0\0\5hello")
    time.sleep(3600)
    raise AssertionError


def settings(pace_s: float = 0.0, *, tokens: int | None = None, prefix: bool = True, **schedule: Any) -> Config:
    return Config(
        model=str(pace_s), cache=CacheConfig(tokens=tokens, prefix=prefix), schedule=ScheduleConfig(**schedule)
    )


@asynccontextmanager
async def running(
    config: Config | None = None, stall_s: float = 60.0, kind: str = "assemble"
) -> AsyncGenerator[EngineClient]:
    client = await EngineClient.start(config or settings(), stall_s=stall_s, engine=f"{__name__}:{kind}")
    try:
        yield client
    finally:
        await client.close()
        assert client._child.exited.done(), "reaped"


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 300))


def request(
    prompt: tuple[int, ...] = (1, 2, 0), max_tokens: int = 20, seed: int = 1, **fields: Any
) -> GenerationRequest:
    """A request that ends at the toy's end token."""
    params = fields.pop("params", SamplingParams(max_tokens=max_tokens))
    return GenerationRequest(prompt, params, fields.pop("stop_ids", (EOS,)), seed, **fields)


def long(seed: int = 1, **fields: Any) -> GenerationRequest:
    """A request that goes on until the context is full."""
    return replace(request(seed=seed, **fields), stop_ids=(), params=SamplingParams(max_tokens=CONTEXT - 3))


def endless(seed: int = 1, **fields: Any) -> GenerationRequest:
    """A request that goes on until somebody ends it, for all that a test cares: thousands of iterations. Needs `ROOMY`."""
    return replace(request(seed=seed, **fields), stop_ids=(), params=SamplingParams(max_tokens=ROOMY["context"] - 9))


def expected(asked: GenerationRequest) -> list[int]:
    return list(reference(asked.prompt, asked.seed, asked.params.max_tokens))


async def tokens_of(client: EngineClient, asked: GenerationRequest) -> tuple[list[int], str]:
    """All tokens of a request, and how it finished."""
    tokens: list[int] = []
    async for gained in client.generate(asked):
        tokens += gained.tokens
        if gained.finish_reason is not None:
            return tokens, gained.finish_reason
    raise AssertionError("the iterator ended without a reason")


async def at_work(client: EngineClient, count: int = 1) -> None:
    """Waits until so many requests run."""
    while (await client.report()).running < count:
        await asyncio.sleep(0.01)
