"""Host time of a turn: the real loop and the real scheduler around a device that answers at once.

Measures what the host adds to every iteration, which a GPU hides as long as it is shorter than the iteration. Owns the stand-in
for the device and the load. Run as `python -m legato.bench.overhead`; the tests run it too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from legato.bench.record import Setting, append
from legato.bench.timing import Spread
from legato.config import PAGE_SIZE
from legato.engine.loop import Engine
from legato.plan import Emission, Outcome, Plan
from legato.runtime.grammar import Grammars
from legato.schedule import Limits, Request, Scheduler
from legato.types import SamplingParams

BARS_US = {1: 300.0, 32: 1500.0}
"""Highest median that counts as hidden, by requests that run: 2 and 10 % of an iteration of about 15 ms."""

VOCABULARY = 1000


def token_at(seed: int, position: int) -> int:
    """What the stand-in says as a request's token at a position."""
    return (seed * 31 + position * 7) % VOCABULARY


@dataclass(frozen=True, slots=True)
class Landed:
    """A flight that is back already."""

    plan: Plan
    landed: Outcome

    def outcome(self) -> Outcome:
        return self.landed


@dataclass(slots=True)
class _Row:
    seed: int
    length: int
    max_length: int
    capacity: int


class InstantRunner:
    """Carries plans out on lengths alone: drafts are accepted by chance (0..K, seeded), cut at the limit and the capacity."""

    def __init__(self, num_drafts: int) -> None:
        self.grammars: Grammars | None = None
        self._num_drafts, self._rows = num_drafts, dict[int, _Row]()
        chance = random.Random(0)
        self._accepted = itertools.cycle([chance.randint(0, num_drafts) for _ in range(4096)])

    def check(self, params: SamplingParams) -> None:
        """Every request can run."""
        del params

    def launch(self, plan: Plan) -> Landed:
        """Runs an iteration."""
        for admit in plan.admits:
            self._rows[admit.row] = _Row(admit.seed, 0, admit.max_length, len(admit.pages) * PAGE_SIZE)
        for grant in plan.grants:
            self._rows[grant.row].capacity = (grant.first + len(grant.pages)) * PAGE_SIZE
        emissions: list[Emission] = []
        for extend in plan.extends:
            row = self._rows[extend.row]
            row.length = extend.start + len(extend.tokens)
            if extend.next_token is None:
                emissions.append(self._emission(extend.row, row, 1, 0))
        for number in plan.decodes:
            emissions.append(self._decode(number, self._rows[number]))
        return Landed(plan, Outcome(plan.epoch, tuple(emissions)))

    def _decode(self, number: int, row: _Row) -> Emission:
        accepted = next(self._accepted)
        count = max(0, min(accepted + 1, row.capacity - row.length, row.max_length - 1 - row.length))
        row.length += count
        return self._emission(number, row, count, accepted)

    def _emission(self, number: int, row: _Row, count: int, accepted: int) -> Emission:
        first = row.length - count + 1
        tokens = tuple(token_at(row.seed, position) for position in range(first, first + count))
        return Emission(number, tokens, row.length + 1 >= row.max_length, accepted, self._num_drafts if count else 0)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run all the time: as one ends, the next arrives. Half of each prompt is the same for all of them."""

    batch: int
    num_drafts: int = 5
    prompt: int = 2048
    output: int = 4096

    @property
    def limits(self) -> Limits:
        """Room for all, and as much again for what the prefix cache keeps."""
        context = self.prompt + self.output
        num_pages = 2 * (self.batch + 1) * (context // PAGE_SIZE + 1)
        return Limits(self.batch, 512, context, self.num_drafts, num_pages, PAGE_SIZE)

    def requests(self) -> Iterator[Request]:
        """One after another, without end."""
        for seed in itertools.count():
            shared = [token_at(0, position) for position in range(self.prompt // 2)]
            own = [token_at(seed, position) for position in range(len(shared), self.prompt)]
            params = SamplingParams(max_tokens=self.output)
            yield Request(f"request-{seed}", (*shared, *own), params, (VOCABULARY,), seed)


@dataclass(slots=True)
class Measured:
    """Seconds of turns that only decode, and of all turns, arrivals among them; `wrong`: requests with another text."""

    decode: list[float]
    turns: list[float]
    wrong: int = 0


class Measurement:
    """An engine under a load that keeps its place from one window to the next."""

    def __init__(self, load: Load) -> None:
        self._load, self._arrivals = load, load.requests()
        self._engine = Engine(Scheduler(load.limits), InstantRunner(load.num_drafts), overlap=True)
        self._open: dict[str, tuple[Request, list[int]]] = {}
        self._is_decoding = False

    def window(self, num_turns: int) -> Measured:
        """Runs turns and takes their times; what a caller does with the tokens is not part of them."""
        measured = Measured([], [])
        while len(measured.decode) < num_turns:
            arrived = [next(self._arrivals) for _ in range(self._load.batch - len(self._open))]
            before = self._engine.stats
            started = perf_counter()
            for request in arrived:
                self._engine.submit(request)
            progress = self._engine.turn()
            seconds = perf_counter() - started
            self._open |= {request.id: (request, []) for request in arrived}
            ended = 0
            for entry in progress:
                request, tokens = self._open[entry.request_id]
                tokens += entry.tokens
                if entry.finish_reason is not None:
                    ended += 1
                    measured.wrong += tokens != self._text(request)
                    del self._open[entry.request_id]
            measured.turns.append(seconds)
            # What settled was launched by the turn before: both must have decoded all requests and nothing else.
            is_full = self._engine.stats.prompt_tokens == before.prompt_tokens and len(progress) == self._load.batch
            if is_full and self._is_decoding and not ended and not arrived:
                measured.decode.append(seconds)
            self._is_decoding = is_full
        return measured

    def _text(self, request: Request) -> list[int]:
        start = len(request.prompt)
        return [token_at(request.seed, position) for position in range(start, start + self._load.output)]


def measure(load: Load, num_windows: int, num_turns: int) -> dict[str, Any]:
    """One line: the window with the lowest median, since the machine may be shared, and the medians of all of them."""
    measurement = Measurement(load)
    measurement.window(num_turns)  # everything is imported, and the cache is as full as it will be
    windows = [measurement.window(num_turns) for _ in range(num_windows)]
    decode = [spread_of(window.decode) for window in windows]
    best = min(decode, key=lambda spread: spread.median_us)
    turns = min((spread_of(window.turns) for window in windows), key=lambda spread: spread.median_us)
    bar = BARS_US.get(load.batch)
    return {
        "bench": "overhead",
        "name": "engine.turn",
        "implementation": "host",
        "case": {"prompt": load.prompt, "output": load.output, "page": PAGE_SIZE, "overlap": True},
        "batch": load.batch,
        "k": load.num_drafts,
        "median_us": best.median_us,
        "p20_us": best.p20_us,
        "p80_us": best.p80_us,
        "window_medians_us": [spread.median_us for spread in decode],
        "all_turns_median_us": turns.median_us,
        "longest_turn_us": round(max(max(window.turns) for window in windows) * 1e6, 1),
        "mean_turn_us": round(min(sum(window.turns) / len(window.turns) for window in windows) * 1e6, 1),
        "turns_per_window": num_turns,
        "bar_us": bar,
        "bytes": 0,
        "roofline_percent": None,
        "correct": not any(window.wrong for window in windows),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def spread_of(seconds: Sequence[float]) -> Spread:
    """The spread of some times of turns."""
    return Spread.of([round(value * 1e6, 1) for value in seconds], "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the times, writes lines if a file is named, and fails where a bar is missed or a text is wrong."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.overhead", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32], help="requests that run")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--turns", type=int, default=1000, help="turns that only decode, per window")
    parser.add_argument("--out", type=Path, default=None, help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    failed = False
    for batch in options.batch:
        line = measure(Load(batch), options.windows, options.turns)
        missed = line["bar_us"] is not None and line["median_us"] > line["bar_us"]
        failed |= missed or not line["correct"]
        print(
            f"batch {batch:2}: median {line['median_us']:.0f} us (p20 {line['p20_us']:.0f}, p80 {line['p80_us']:.0f}), "
            f"bar {line['bar_us'] or '-'}; mean of all turns {line['mean_turn_us']:.0f} us, longest "
            f"{line['longest_turn_us']:.0f} us{'' if line['correct'] else '; WRONG TEXT'}{'; MISSED' if missed else ''}"
        )
        if options.out is not None:
            append(options.out, [line], Setting.here(torch.device("cpu")))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
