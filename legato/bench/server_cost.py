"""What the server costs: processor time per request and per streamed chunk, and the time that it adds to every chunk.

The whole of `legato serve` (HTTP, chat template, parser, engine's client and process) around an engine that sleeps
(`legato.bench.paced_engine`), asked over HTTP from outside. Owns the load and the arithmetic. Run as
`python -m legato.bench.server_cost`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from legato.bench.paced_engine import ITERATION_S, TOKENS, seconds_since
from legato.bench.record import Setting, append
from legato.bench.served import Served, cpu_seconds, serving
from legato.bench.timing import Spread
from legato.config import Config
from legato.server.http.listening import listen
from legato.server.run import Ready, in_loop, serve
from legato.server.settings import Listen, ServerSettings

BAR_US = 100.0
"""Most processor time per streamed chunk. With 64 streams and an iteration of 20 ms that is a third of a core."""
ENGINE = "legato.bench.paced_engine:assemble"
CHUNKS = 100
"""Of a long stream; a first one with a single token comes before them."""
WORDS = "The quick brown fox jumps over the lazy dog and writes a function that counts the words of its text. " * 6


@dataclass(slots=True)
class Arrivals:
    """Of one reply: the pieces of its bytes, each with the time at which it was received."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])


class Connection(asyncio.Protocol):
    """A client that does next to nothing but note when bytes come: what it did besides would count as the server's delay."""

    def __init__(self) -> None:
        self._arrivals, self._tail = Arrivals(), b""
        self._left: int | None = None
        self._done: asyncio.Future[Arrivals] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails the reply that is awaited."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    async def ask(self, request: bytes) -> Arrivals:
        """Sends a request and returns its reply. Raises ConnectionError."""
        assert self._transport is not None
        self._arrivals, self._tail, self._left = Arrivals(), b"", None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        """Notes the time; knows the end of a chunked body, and of one with a length."""
        self._arrivals.pieces.append((time.monotonic(), data))
        assert self._done is not None
        if self._left is None and len(self._arrivals.pieces) == 1:
            head, _, body = data.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if b"content-length" in fields:
                self._left = int(fields[b"content-length"]) - len(body)
        elif self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-7:]
        if self._left == 0 or (self._left is None and self._tail == b"\r\n0\r\n\r\n"):
            self._done.set_result(self._arrivals)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True, slots=True)
class Workload:
    """What every client asks again and again."""

    max_tokens: int
    is_stream: bool

    def request(self, host: str) -> bytes:
        """The bytes of the request."""
        body = {
            "messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": WORDS[:200]}],
            "max_tokens": self.max_tokens,
            "stream": self.is_stream,
            "stream_options": {"include_usage": True} if self.is_stream else None,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


WHOLE, BRIEF, LONG = Workload(1, False), Workload(1, True), Workload(1 + CHUNKS * TOKENS, True)


@dataclass(slots=True)
class Window:
    """What one window of one workload took: requests, seconds of the server's processor, and the delay of each chunk."""

    requests: int
    seconds: float
    cpu_s: float
    engine_cpu_s: float
    delays_s: list[float] = field(default_factory=list[float])
    wrong: int = 0


class Load:
    """So many clients, each on its own connection."""

    def __init__(self, served: Served, concurrency: int) -> None:
        self._served, self._concurrency = served, concurrency
        address = urlsplit(served.url)
        self._host, self._port = address.hostname or "", address.port or 0

    async def window(self, workload: Workload, requests: int) -> Window:
        """`requests` requests, spread over the clients."""
        loop, request = asyncio.get_running_loop(), workload.request(f"{self._host}:{self._port}")
        connections = [
            (await loop.create_connection(Connection, self._host, self._port))[1] for _ in range(self._concurrency)
        ]
        replies: list[Arrivals] = []

        async def client(connection: Connection, count: int) -> None:
            for _ in range(count):
                replies.append(await connection.ask(request))

        each = -(-requests // self._concurrency)
        server, engine = self._served.pids[:2]
        before, engine_before, started = cpu_seconds(server), cpu_seconds(engine), time.monotonic()
        await asyncio.gather(*(client(connection, each) for connection in connections))
        window = Window(
            requests=each * self._concurrency,
            seconds=time.monotonic() - started,
            cpu_s=cpu_seconds(server) - before,
            engine_cpu_s=cpu_seconds(engine) - engine_before,
        )
        for connection in connections:
            connection.close()
        for reply in replies:
            _judge(window, workload, reply)
        return window


def _judge(window: Window, workload: Workload, reply: Arrivals) -> None:
    """Counts a reply's delays, and it as wrong where it is not what the stand-in says."""
    if not workload.is_stream:
        body = json.loads(b"".join(data for _, data in reply.pieces).partition(b"\r\n\r\n")[2])
        window.wrong += body["usage"]["completion_tokens"] != workload.max_tokens
        return
    delays, tokens = delays_of(reply)
    window.delays_s += delays
    window.wrong += tokens != workload.max_tokens or len(delays) != (workload.max_tokens - 1) // TOKENS


def delays_of(reply: Arrivals) -> tuple[list[float], int]:
    """Of a stream: how long each chunk with a time took to come, and the tokens that its usage tells."""
    delays: list[float] = []
    pending, tokens = b"", 0
    for at, data in reply.pieces:
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            _, found, text = event.partition(b"data: ")
            if not found or text == b"[DONE]":
                continue
            chunk: dict[str, Any] = json.loads(text)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            content: str = chunk["choices"][0]["delta"].get("content") or "" if chunk["choices"] else ""
            if len(content) == TOKENS:
                delays.append(seconds_since(content, at))
    return delays, tokens


@dataclass(slots=True)
class Figures:
    """What windows of all three workloads say, in microseconds of the server's processor."""

    whole_us: list[float] = field(default_factory=list[float])
    stream_us: list[float] = field(default_factory=list[float])
    chunk_us: list[float] = field(default_factory=list[float])
    delay_us: list[float] = field(default_factory=list[float])
    busy: list[float] = field(default_factory=list[float])
    wrong: int = 0

    def take(self, whole: Window, brief: Window, long: Window) -> None:
        """One window of each. What a stream costs but for its chunks is what one with a single token costs."""
        self.whole_us.append(whole.cpu_s / whole.requests * 1e6)
        self.stream_us.append(brief.cpu_s / brief.requests * 1e6)
        rest = long.cpu_s - long.requests * statistics.median(self.stream_us) / 1e6
        self.chunk_us.append(rest / (long.requests * CHUNKS) * 1e6)
        self.delay_us += [delay * 1e6 for delay in long.delays_s]
        self.busy.append(long.cpu_s / long.seconds)
        self.wrong += whole.wrong + brief.wrong + long.wrong


async def measure(concurrency: int, windows: int, requests: int) -> list[dict[str, Any]]:
    """Lines of a record: per whole request, per streamed request, per chunk, and the delay of chunks."""
    command = [sys.executable, "-m", "legato.bench.server_cost", "--serve"]
    figures = Figures()
    async with serving(command) as served:
        load = Load(served, concurrency)
        await load.window(BRIEF, 2 * concurrency)
        for _ in range(windows):
            whole = await load.window(WHOLE, requests)
            brief = await load.window(BRIEF, requests)
            figures.take(whole, brief, await load.window(LONG, max(concurrency, requests // 20)))
    figures.wrong += len(served.faults)
    case = {"concurrency": concurrency, "iteration_ms": ITERATION_S * 1e3, "tokens_per_chunk": TOKENS, "chunks": CHUNKS}
    samples = {
        "request, whole": figures.whole_us,
        "request, streamed": figures.stream_us,
        "chunk, streamed": figures.chunk_us,
        "delay of a chunk": figures.delay_us,
    }
    return [_line(name, case, values, figures) for name, values in samples.items()]


def _line(name: str, case: dict[str, Any], values: Sequence[float], figures: Figures) -> dict[str, Any]:
    spread = Spread.of([round(value, 1) for value in values], "cpu")
    return {
        "bench": "server-cost",
        "name": name,
        "implementation": "whole",
        "case": case,
        **spread.fields,
        "p99_us": round(sorted(values)[round(0.99 * (len(values) - 1))], 1),
        "least_us": round(min(values), 1),
        "samples": len(values),
        "busy_cores": round(statistics.median(figures.busy), 3),
        "bar_us": BAR_US if name.startswith("chunk") else None,
        "bytes": 0,
        "roofline_percent": None,
        "correct": not figures.wrong,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def run_server() -> None:
    """The server's process: `legato serve` with the stand-in for its engine."""

    def ready(what: Ready) -> None:
        print(what.url, flush=True)

    settings = ServerSettings(listen=Listen("127.0.0.1", 0))
    with listen(settings.listen) as sock:
        serving = serve(
            Config(), settings, sock, access_log=False, engine=ENGINE, on_progress=lambda _: None, on_ready=ready
        )
        in_loop(serving)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures, writes lines if a file is named, and fails where the bar is missed or a reply is wrong."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.server_cost", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per window; long streams are a twentieth")
    parser.add_argument("--out", type=Path, default=None, help="file to append JSON lines to")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        run_server()
        return 0
    is_failed = False
    for concurrency in options.concurrency:
        lines = asyncio.run(measure(concurrency, options.windows, options.requests))
        for line in lines:
            is_missed = line["bar_us"] is not None and line["median_us"] > line["bar_us"]
            is_failed |= is_missed or not line["correct"]
            print(
                f"{concurrency:2} clients, {line['name']:17}: median {line['median_us']:.0f} us (p20 {line['p20_us']:.0f}, "
                f"p80 {line['p80_us']:.0f}, p99 {line['p99_us']:.0f}, least {line['least_us']:.0f})"
                f"{'' if line['correct'] else '; WRONG REPLIES'}{'; MISSED' if is_missed else ''}",
                flush=True,
            )
        if options.out is not None:
            append(options.out, lines, Setting.here(torch.device("cpu")))
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
