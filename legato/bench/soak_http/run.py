"""The soak from start to end: the server, its clients, a line every so often, and the judgement.

Owns the order: most of the time everything happens, clients that leave among it; then, from rest to rest, a time in which every
client stays, so that both sides can be compared to the token. Called as `python -m legato.bench.soak_http`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from legato.bench.load.wire import Wire
from legato.bench.record import Setting, append
from legato.bench.resident import Growth, resident_mib
from legato.bench.served import Served, serving
from legato.bench.soak_http.asks import CONTEXT, MAX_BODY_MIB, Asks
from legato.bench.soak_http.clients import Clients
from legato.bench.soak_http.ledger import Ledger, Scrape
from legato.bench.timing import Spread
from legato.checkpoints import HELD_OUT
from legato.config import ConfigError

SERVER = (
    "--port", "0", "--context", str(CONTEXT), "--max-running", "8", "--max-waiting", "20", "--cache-tokens", "6144",
    "--max-body-mb", str(MAX_BODY_MIB), "--log-format", "json", "--verify-speculation", "0.02",
)  # fmt: skip
"""Less room than the clients want: half of them run, some are refused, and what the prefix cache keeps has to give way."""
GROWTH_MIB = {"server": 32.0, "engine": 64.0}
"""Most that a process may grow between the first fifth of the time and the last."""
EXACT_SHARE = 0.2
"""Of the time, that in which every client stays."""
REST_S = 30.0


@dataclass(slots=True)
class Soak:
    """What is watched while the clients run. `served`: `None` for a server that somebody else has started."""

    url: str
    served: Served | None
    clients: Clients
    seconds: float
    started: float = field(default_factory=time.monotonic)
    growth: dict[str, Growth] = field(default_factory=lambda: {name: Growth() for name in GROWTH_MIB})

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    async def scrape(self) -> Scrape:
        """The server's counters now."""
        async with Wire(self.url, 60.0) as wire:
            _, text = await wire.get("/metrics", {})
        return Scrape.of(text.decode())

    async def at_rest(self) -> tuple[Scrape, list[str]]:
        """The counters once nothing runs any more, and which gauges have not come back."""
        end = time.monotonic() + REST_S
        while True:
            scrape = await self.scrape()
            names = ("requests_running", "requests_waiting", "cache_pages_used")
            held = [f"legato_{name} is {scrape.gauge(name):g} at rest" for name in names if scrape.gauge(name)]
            if not held or time.monotonic() > end:
                return scrape, held
            await asyncio.sleep(0.5)

    async def flushed(self) -> list[str]:
        """What the prefix cache still holds after it was told to let go."""
        async with Wire(self.url, 60.0) as wire:
            _, pieces = await wire.post("/flush_cache", b"{}", {"content-type": "application/json"})
            _ = [piece async for piece in pieces]
        await asyncio.sleep(1.5)
        held = (await self.scrape()).gauge("cache_pages_prefix")
        return [f"legato_cache_pages_prefix is {held:g} after a flush"] if held else []

    def note_memory(self) -> None:
        """Reads what the processes use."""
        if self.served is None:
            return
        server, *others = self.served.pids
        self.growth["server"].note(self.elapsed, resident_mib(server))
        self.growth["engine"].note(self.elapsed, sum(resident_mib(pid) for pid in others))

    async def report(self, every: float) -> None:
        """A line on the screen every so often."""
        while True:
            self.note_memory()
            ledger, scrape = self.clients.ledger, await self.scrape()
            memory = ", ".join(f"{name} {growth.last_mib:.0f} MiB" for name, growth in self.growth.items())
            ends = {reason: str(seen) for reason, seen in ledger.ends.items() if seen.most}
            print(
                f"{self.elapsed / 60:5.1f} min: {sum(ledger.kinds.values())} asked, statuses {dict(ledger.statuses)}, ended "
                f"{ends}; {scrape.gauge('requests_running'):.0f} run, {scrape.gauge('requests_waiting'):.0f} wait; {memory}; "
                f"{len(ledger.wrong)} faults",
                flush=True,
            )
            await asyncio.sleep(every)


async def soak(options: argparse.Namespace) -> list[str]:
    """Runs both parts, writes their records, and returns what was wrong."""
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_bytes().splitlines()]
    wrong: list[str] = []
    async with _server(options) as served:
        url = options.url if served is None else served.url
        clients = Clients(url, Asks(texts, options.seed), Ledger(), options.seed)
        watch = Soak(url, served, clients, options.minutes * 60)
        num_files = None if served is None else served.num_files
        before, held = await watch.at_rest()
        wrong += held
        reporting = asyncio.create_task(watch.report(options.every))
        try:
            for name, share, exact in (("all", 1 - EXACT_SHARE, False), ("all stay", EXACT_SHARE, True)):
                clients.begin()
                stop = watch.elapsed + watch.seconds * share
                await clients.run(options.clients, lambda stop=stop: watch.elapsed >= stop, exact=exact)
                after, held = await watch.at_rest()
                faults = [*clients.ledger.wrong, *held, *clients.ledger.disagreements(after.since(before))]
                if name == "all stay":
                    faults += await watch.flushed() + _grown(watch)
                    faults += await _files(served, num_files) + _diverged(after)
                wrong += [f"{fault} ({name})" for fault in faults]
                if options.out is not None:
                    append(options.out, [_line(options, watch, name, after.since(before), faults)], _setting())
                before = after
        finally:
            reporting.cancel()
    if served is not None:
        wrong += [f"the server logged: {line}" for line in served.faults[:20]]
        wrong += [f"the server's exit code is {served.code}"] if served.code else []
    return wrong


@contextlib.asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncGenerator[Served | None]:
    if options.url:
        yield None
        return
    model = () if options.model is None else (options.model,)
    async with serving(
        [sys.executable, "-m", "legato", "serve", *model, "--device", options.device, *SERVER]
    ) as served:
        yield served


def _grown(watch: Soak) -> list[str]:
    """Processes that have grown too much."""
    watch.note_memory()
    grown = {name: growth.mib(watch.elapsed) for name, growth in watch.growth.items()}
    return [
        f"the {name}'s process has grown by {mib:.0f} MiB; {GROWTH_MIB[name]:.0f} are allowed"
        for name, mib in grown.items()
        if mib > GROWTH_MIB[name]
    ]


async def _files(served: Served | None, before: int | None) -> list[str]:
    """Connections that the server has not let go. Its own idle limit may still have to pass for the last ones."""
    if served is None or before is None:
        return []
    for _ in range(20):
        if served.num_files <= before:
            return []
        await asyncio.sleep(0.5)
    return [f"the server holds {served.num_files} files open; at the start it was {before}"]


def _diverged(scrape: Scrape) -> list[str]:
    count = scrape.gauge("selfcheck_divergences_total")
    return [f"{count:.0f} replays without drafts gave other tokens"] if count else []


def _setting() -> Setting:
    return Setting.here(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _line(
    options: argparse.Namespace, watch: Soak, name: str, counted: Scrape, faults: Sequence[str]
) -> dict[str, Any]:
    """One part of the soak as a record. Times are those of whole replies, as the clients waited for them."""
    clients = watch.clients
    spread = Spread.of([round(seconds * 1e6) for seconds in clients.latencies] or [0.0], "cpu")
    return {
        "bench": "soak",
        "name": "http",
        "implementation": "whole",
        "case": {
            "part": name,
            "clients": options.clients,
            "context": CONTEXT,
            "server": list(SERVER),
            "url": options.url,
        },
        "median_us": spread.median_us,
        "p20_us": spread.p20_us,
        "p80_us": spread.p80_us,
        "bytes": clients.num_bytes,
        "chunks": clients.num_chunks,
        "roofline_percent": None,
        "correct": not faults,
        "wrong": list(faults),
        "seconds": round(watch.elapsed, 1),
        **clients.ledger.summary(counted),
        "preemptions": int(counted.gauge("preemptions_total")),
        "evicted_pages": int(counted.gauge("evicted_pages_total")),
        "checked": int(counted.gauge("selfcheck_requests_total")),
        "diverged": int(counted.gauge("selfcheck_divergences_total")),
        "accept_length": round(_accept_length(counted), 3),
        "resident_mib": {each: round(growth.last_mib, 1) for each, growth in watch.growth.items()},
        "growth_mib": {each: round(growth.mib(watch.elapsed), 1) for each, growth in watch.growth.items()},
        "growth_bound_mib": GROWTH_MIB,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _accept_length(counted: Scrape) -> float:
    rounds = counted.total("draft_rounds_total")
    return 1 + counted.total("accepted_tokens_total") / rounds if rounds else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints progress, and fails if anything was wrong or has not come back."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.soak_http", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two lines of progress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default=None, help="of a running server, without keys; by default one is started")
    parser.add_argument("--model", default=None, help="by default the checkpoint that ships with Legato")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    try:
        wrong = asyncio.run(soak(options))
    except ConfigError as error:
        print(f"soak_http: {error}", file=sys.stderr)
        return 2
    for fault in wrong[:50]:
        print(f"WRONG: {fault}", file=sys.stderr)
    print("everything has come back, and both sides count the same" if not wrong else f"{len(wrong)} faults")
    return int(bool(wrong))
