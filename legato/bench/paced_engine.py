"""An engine in its own process that answers at a fixed pace, and whose text says when it left: for what the server adds to it.

The real loop, scheduler, process and messages around a device that sleeps. Every iteration brings each request `TOKENS` tokens,
which spell the time at which they were sent. Named on the command line of `engine.process` by `legato.bench.server_cost`.
"""

from __future__ import annotations

import itertools
import string
import time
from dataclasses import replace

from legato.bench.overhead import InstantRunner, Landed
from legato.config import PAGE_SIZE, Config
from legato.engine.loop import Engine
from legato.engine.messages import EngineInfo
from legato.engine.serving import OnProgress, Served
from legato.engine.start import open_checkpoint
from legato.plan import Plan
from legato.schedule import Limits, Progress, Scheduler
from legato.server.text.tokenizer import Tokenizer

ITERATION_S = 0.02
"""Time of an iteration, as a large model has it."""
TOKENS = 4
"""Per iteration and request: an accept length of 4."""
NUM_DRAFTS, CONTEXT, ROWS = 5, 4096, 64
DIGITS = string.ascii_letters + string.digits
TICK_S = 1e-5
"""Of a time that is told; four digits last for about 150 s."""
PERIOD = len(DIGITS) ** TOKENS


def spelled(seconds: float) -> str:
    """A time of the monotonic clock in `TOKENS` digits, the lowest first."""
    ticks = round(seconds / TICK_S)
    return "".join(DIGITS[ticks // len(DIGITS) ** place % len(DIGITS)] for place in range(TOKENS))


def seconds_since(text: str, now: float) -> float:
    """How long ago, before `now`, a time was spelled. Raises ValueError for a text that is none."""
    if len(text) != TOKENS:
        raise ValueError(f"{text!r} is no time")
    ticks = sum(DIGITS.index(digit) * len(DIGITS) ** place for place, digit in enumerate(text))
    return (round(now / TICK_S) - ticks) % PERIOD * TICK_S


class PacedRunner(InstantRunner):
    """Carries plans out on lengths alone, one per `ITERATION_S`."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFTS)
        self._accepted = itertools.cycle([TOKENS - 1])
        self._due = 0.0

    def launch(self, plan: Plan) -> Landed:
        """Runs an iteration, and takes the time of one."""
        landed, now = super().launch(plan), time.monotonic()
        self._due = max(self._due + ITERATION_S, now)
        time.sleep(self._due - now)
        return landed


class StampedEngine(Engine):
    """Its tokens spell the time at which a turn gave them out."""

    def __init__(self, scheduler: Scheduler, runner: PacedRunner, ids: dict[str, int]) -> None:
        super().__init__(scheduler, runner, overlap=True)
        self._ids = ids

    def turn(self) -> list[Progress]:
        """One turn."""
        gained = super().turn()
        stamp = tuple(self._ids[digit] for digit in spelled(time.monotonic()))
        return [replace(progress, tokens=stamp[: len(progress.tokens)]) for progress in gained]


def assemble(config: Config, progress: OnProgress) -> Served:
    """The stand-in, with the text files of the checkpoint of `config`."""
    del progress
    checkpoint = open_checkpoint(config.model)
    tokenizer = Tokenizer.open(checkpoint.source)
    ids = {digit: tokenizer.encode(digit)[0] for digit in DIGITS}
    num_pages = ROWS * (CONTEXT // PAGE_SIZE + 1)
    scheduler = Scheduler(Limits(ROWS, 8192, CONTEXT, NUM_DRAFTS, num_pages, PAGE_SIZE))
    info = EngineInfo(
        model=checkpoint.label,
        folder=str(checkpoint.file("config.json").parent),
        device="cpu",
        context=CONTEXT,
        cache_tokens=num_pages * PAGE_SIZE,
        num_drafts=NUM_DRAFTS,
        max_running=ROWS,
        vocab_size=tokenizer.vocab_size,
        load_seconds=0.0,
        latent="none",
        index="none",
    )
    return Served(StampedEngine(scheduler, PacedRunner(), ids), info, NoProfiler())


class NoProfiler:
    """There is nothing to trace."""

    def start(self, folder: str) -> None:
        """Refuses."""
        raise RuntimeError(f"a stand-in has no trace to write to {folder}")

    def stop(self) -> str:
        """Refuses."""
        raise RuntimeError("nothing is being recorded")
