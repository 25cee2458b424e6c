"""The engine under a long generated load, and whether everything it took has come back: pages, rows, host slots, memory.

Agents that continue their conversations, short and long prompts, samples, grammars, penalties, deadlines, aborts, preemptions and
flushes, in a pool that is too small for them. A request that is asked again and again must get the same answer every time. Run as
`python -m legato.bench.soak`; knows the engine only as its callers do.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from legato.bench.record import Setting, append
from legato.bench.resident import Growth, resident_mib
from legato.checkpoints import HELD_OUT
from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig
from legato.engine.loop import Engine
from legato.engine.start import Started, open_checkpoint, start
from legato.llm import vocabulary_of
from legato.runtime.grammar import Grammars
from legato.schedule import Progress, QueueFull, Request
from legato.server.text.tokenizer import Tokenizer
from legato.types import SamplingParams, samples_of

CONTEXT, CACHE_TOKENS, HOST_TOKENS = 448, 960, 2048
"""A pool of about two full contexts for six requests, and host memory for twice as much again."""
GROWTH_MIB = 64
"""Most that the process may grow between the first fifth of the time and the last."""
SENTINEL = "sentinel"
SCHEMA = (
    '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'
)


@dataclass(slots=True)
class Open:
    """A request on its way: what came, and after how many turns its caller loses patience."""

    request: Request
    tokens: list[int]
    patience: int | None
    agent: int | None


@dataclass(slots=True)
class Ledger:
    """What has been asked and how it ended. `wrong`: what must never happen, in words."""

    ends: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list[str])


class Load:
    """Requests without end, drawn from a seed. Agents come back with what they got, and a little more."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], stop_ids: tuple[int, ...], seed: int) -> None:
        self._draw, self._stop_ids = random.Random(seed), stop_ids
        self._text = [token for prompt in prompts for token in prompt]
        self._agents: list[tuple[int, ...]] = [self._piece(30 + 9 * n) for n in range(6)]
        self._busy: set[int] = set()
        self._count = 0

    def arrivals(self) -> Iterator[Open]:
        """What one arrival brings: one request, or the samples of one."""
        draw = self._draw
        self._count += 1
        if self._count % 16 == 0:
            params = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
            yield Open(Request(f"{SENTINEL}-{self._count}", tuple(self._text[:150]), params, (), 7), [], None, None)
            return
        agent = draw.choice([None, *(n for n in range(len(self._agents)) if n not in self._busy)])
        prompt = self._piece(draw.choice((1, 20, 63, 64, 65, 130, 300)))
        if agent is not None:
            self._busy.add(agent)
            prompt = self._agents[agent] + self._piece(draw.randint(1, 20))
        params = self._params(len(prompt), is_agent=agent is not None)
        patience = draw.randint(0, 12) if draw.random() < 0.15 else None
        deadline = time.monotonic() + draw.uniform(0, 6) if draw.random() < 0.1 else None
        salt, priority = draw.choice(("", "", "", "salt")), draw.choice((0, 0, 0, 1))
        for number, sample in enumerate(samples_of(params)):
            seed = draw.getrandbits(62) if sample.seed is None else sample.seed
            name = f"r{self._count}.{number}"
            stop_ids = () if params.constraint is None and draw.random() < 0.5 else self._stop_ids
            request = Request(name, prompt, sample, stop_ids, seed, None, priority, deadline, salt)
            yield Open(request, [], patience, agent if number == 0 else None)

    def ended(self, done: Open) -> None:
        """An agent keeps what it was told, and starts again when it has little room left."""
        if done.agent is not None:
            said = tuple(token for token in done.tokens if token not in self._stop_ids)
            text = (*done.request.prompt, *said)
            self._agents[done.agent] = text if len(text) < CONTEXT - 80 else self._piece(40)
            self._busy.discard(done.agent)

    def _piece(self, length: int) -> tuple[int, ...]:
        first = self._draw.randrange(len(self._text) - length)
        return tuple(self._text[first : first + length])

    def _params(self, prompt_len: int, *, is_agent: bool) -> SamplingParams:
        draw = self._draw
        room = CONTEXT - prompt_len
        more: dict[str, Any] = {"max_tokens": min(room, draw.choice((1, 7, 30, 60)))}
        more |= draw.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}, {"seed": draw.randrange(99)}))
        more |= draw.choice(
            (
                {}, {}, {"regex": "(ab|cd)+ ?"}, {"json_schema": SCHEMA}, {"presence_penalty": 1.0, "min_p": 0.05},
                {"repetition_penalty": 1.2, "logit_bias": {198: -100}}, {"logprobs": 2}, {"prompt_logprobs": 0},
                {} if is_agent else {"n": 3},
            )
        )  # fmt: skip
        return SamplingParams(**more)


class Soak:
    """An engine, its load, and the books about both."""

    def __init__(self, started: Started, load: Load, seed: int) -> None:
        self.engine: Engine = started.engine
        self.ledger = Ledger()
        self._load, self._draw = load, random.Random(seed)
        self._open: dict[str, Open] = {}
        self._answer: list[int] | None = None

    def turn(self, *, arrivals: bool) -> None:
        """Arrivals, disturbances, one turn, and what it brought."""
        if arrivals and len(self._open) < 14 and self._draw.random() < 0.5:
            self._arrive()
        self._disturb()
        for progress in self.engine.turn():
            self._take(progress)

    def at_rest(self) -> list[str]:
        """What is still held when nothing is open and the cache has been flushed; nothing, if all is well."""
        held = {name: len(self._open) for name in ("open",) if self._open}
        self.engine.flush_cache()
        gauges = self.engine.gauges
        held |= {"rows": gauges.used_rows, "pages": gauges.used_pages, "cached pages": gauges.cached_pages}
        held |= {"waiting": gauges.waiting, "running": gauges.running, "host slots": self.engine.stats.host_pages}
        return [f"{count} {name} still held" for name, count in held.items() if count]

    def _arrive(self) -> None:
        for arrived in self._load.arrivals():
            try:
                self.engine.submit(arrived.request)
            except QueueFull:
                self.ledger.refused += 1
                self._load.ended(arrived)
                continue
            self._open[arrived.request.id] = arrived
            self.ledger.kinds[_kind(arrived.request)] += 1

    def _disturb(self) -> None:
        for name, entry in list(self._open.items()):
            if entry.patience is not None:
                entry.patience -= 1
                if entry.patience < 0:
                    entry.patience = None
                    self.engine.abort(name)
        if self._open and self._draw.random() < 0.05:
            self.engine.preempt(self._draw.choice(list(self._open)))
        if self._draw.random() < 0.002:
            self.engine.flush_cache()

    def _take(self, progress: Progress) -> None:
        entry = self._open.get(progress.request_id)
        if entry is None:
            self.ledger.wrong.append(f"progress for {progress.request_id}, which is not open")
            return
        entry.tokens += progress.tokens
        self.ledger.tokens += len(progress.tokens)
        if progress.finish_reason is None:
            return
        del self._open[progress.request_id]
        self.ledger.ends[progress.finish_reason] += 1
        self._load.ended(entry)
        request = entry.request
        if len(entry.tokens) > (request.params.max_tokens or CONTEXT):
            self.ledger.wrong.append(f"{request.id} got {len(entry.tokens)} tokens, more than it asked for")
        if request.id.startswith(SENTINEL):
            self._answer = self._answer or entry.tokens
            if entry.tokens != self._answer:
                self.ledger.wrong.append(f"{request.id} got another answer than the first one")


def _kind(request: Request) -> str:
    params = request.params
    if request.id.startswith(SENTINEL):
        return SENTINEL
    return params.constraint.kind if params.constraint is not None else "plain"


def build(model: str | None, device: str, seed: int) -> Soak:
    """An engine with little room, and the load for it."""
    config = Config(
        model=model,
        cache=CacheConfig(tokens=CACHE_TOKENS, host_tokens=HOST_TOKENS),
        schedule=ScheduleConfig(max_running=6, chunk_tokens=128, context=CONTEXT, max_waiting=12),
        execution=ExecutionConfig(device=device, overlap="on"),
        verify_speculation=0.05,
    )
    started = start(config, open_checkpoint(model))
    tokenizer = Tokenizer.open(started.checkpoint.source)
    started.engine.runner.grammars = Grammars(vocabulary_of(tokenizer, started.spec.vocab_size))
    lines = HELD_OUT.read_bytes().splitlines()
    prompts = [tuple(tokenizer.encode_prompt(msgspec.json.decode(line)["text"])) for line in lines]
    return Soak(started, Load(prompts, tuple(sorted(tokenizer.stop_ids)), seed), seed)


@dataclass(slots=True)
class Watch:
    """Progress every so often: a line on the screen, a line in the file, and the memory for the judgement at the end."""

    soak: Soak
    seconds: float
    out: Path | None
    device: torch.device
    started: float = field(default_factory=time.monotonic)
    memory: Growth = field(default_factory=Growth)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def report(self, **more: Any) -> None:
        """Says where things stand."""
        gauges, stats, ledger = self.soak.engine.gauges, self.soak.engine.stats, self.soak.ledger
        self.memory.note(self.elapsed, resident_mib())
        line = {
            "bench": "soak",
            "name": "engine",
            "implementation": "whole",
            "case": {"context": CONTEXT, "cache_tokens": CACHE_TOKENS, "host_tokens": HOST_TOKENS},
            "seconds": round(self.elapsed, 1),
            "ends": dict(ledger.ends),
            "kinds": dict(ledger.kinds),
            "refused": ledger.refused,
            "tokens": ledger.tokens,
            "iterations": stats.iterations,
            "accept_length": round(stats.accept_length, 3),
            "preemptions": stats.preemptions,
            "hit_tokens": stats.hit_tokens,
            "host_hit_tokens": stats.host_hit_tokens,
            "evicted_pages": stats.evicted_pages,
            "host_evicted_pages": stats.host_evicted_pages,
            "checked": stats.checked,
            "diverged": stats.diverged,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "used_pages": gauges.used_pages,
            "cached_pages": gauges.cached_pages,
            "host_pages": stats.host_pages,
            "resident_mib": round(self.memory.last_mib, 1),
            "correct": not ledger.wrong and not stats.diverged,
            **more,
        }
        print(
            f"{self.elapsed / 60:5.1f} min: {sum(ledger.ends.values())} ended {dict(ledger.ends)}, {ledger.tokens} tokens, "
            f"{stats.preemptions} preempted, {stats.host_hit_tokens} tokens from the host, pages {gauges.used_pages} used "
            f"{gauges.cached_pages} cached {stats.host_pages} on the host, {self.memory.last_mib:.0f} MiB",
            flush=True,
        )
        if self.out is not None:
            append(self.out, [line], Setting.here(self.device))


def run(soak: Soak, watch: Watch, interval: float) -> list[str]:
    """Runs for the watch's time, drains, and returns what is wrong."""
    due = 0.0
    while watch.elapsed < watch.seconds:
        soak.turn(arrivals=True)
        if watch.elapsed >= due:
            watch.report()
            due = watch.elapsed + interval
    growth = watch.memory.mib(watch.elapsed)
    turns = 0
    while soak.engine.has_work and turns < 100_000:
        soak.turn(arrivals=False)
        turns += 1
    gc.collect()
    wrong = soak.ledger.wrong + soak.at_rest()
    stats = soak.engine.stats
    if stats.diverged:
        wrong.append(f"{stats.diverged} of {stats.checked} replays without drafts gave other tokens")
    if growth > GROWTH_MIB:
        wrong.append(f"the process has grown by {growth:.0f} MiB; {GROWTH_MIB} are allowed")
    watch.report(growth_mib=round(growth, 1), growth_bound_mib=GROWTH_MIB, wrong=wrong, at_rest=not soak.at_rest())
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints progress, and fails if anything was wrong or has not come back."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two lines of progress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=None, help="by default the checkpoint that ships with Legato")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    soak = build(options.model, options.device, options.seed)
    device = torch.device("cuda" if options.device == "auto" and torch.cuda.is_available() else "cpu")
    watch = Watch(soak, options.minutes * 60, options.out, device)
    wrong = run(soak, watch, options.every)
    for fault in wrong:
        print(f"WRONG: {fault}", file=sys.stderr)
    print("everything has come back" if not wrong else f"{len(wrong)} faults")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
