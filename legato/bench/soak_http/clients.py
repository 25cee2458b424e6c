"""The clients: each sends one request after another, reads as well or as badly as the request says, and judges what comes.

Owns connections and patience. Knows neither the server's counters nor its processes. Called by `legato.bench.soak_http.run`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import aclosing
from urllib.parse import urlsplit

from legato.bench.load.events import EventReader
from legato.bench.load.wire import Pieces, Wire, WireError
from legato.bench.soak_http.asks import Ask, Asks
from legato.bench.soak_http.ledger import Ledger
from legato.bench.soak_http.replies import QueueFull, Reply, ReplyError, read_event, read_whole

_JSON = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
TIMEOUT_S = 600.0
FAULTS = (WireError, OSError, ReplyError, ValueError, KeyError, IndexError)
"""What a reply that is none raises while it is read; TimeoutError is an OSError."""


class Clients:
    """Some clients at once, on connections of their own, until they are told to stop.

    Args:
        url: of the server.
        asks: what they ask.
        ledger: where they write what they see.
    """

    def __init__(self, url: str, asks: Asks, ledger: Ledger, seed: int) -> None:
        self._url, self._asks, self.ledger, self._draw = url, asks, ledger, random.Random(seed)
        self.latencies: list[float] = []
        self.num_bytes = self.num_chunks = 0
        self._sentinel: str | None = None

    def begin(self) -> None:
        """Opens new books; the sentinel's answer stays what it was."""
        self.ledger, self.latencies = Ledger(), []
        self.num_bytes = self.num_chunks = 0

    async def run(self, count: int, until: Callable[[], bool], *, exact: bool) -> None:
        """Asks, with `count` clients, until `until` says so; every reply that has begun is awaited."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client(until, exact))

    async def ask(self, wire: Wire, ask: Ask) -> None:
        """One request, whatever becomes of it."""
        self.ledger.sent(ask)
        try:
            if ask.conduct == "walks off":
                await self._walk_off(ask)
            else:
                await self._follow(wire, ask)
        except QueueFull:
            self.ledger.late_refusals += 1
            self.ledger.refusal(ask, 429)
        except FAULTS as error:
            self.ledger.wrong.append(f"{ask.kind} ({ask.conduct}): {type(error).__name__}: {error}"[:500])

    async def _client(self, until: Callable[[], bool], exact: bool) -> None:
        async with Wire(self._url, TIMEOUT_S) as wire:
            while not until():
                await self.ask(wire, self._asks.next(exact=exact))
                if self._draw.random() < 0.2:
                    await asyncio.sleep(self._draw.random())

    async def _follow(self, wire: Wire, ask: Ask) -> None:
        started = asyncio.get_running_loop().time()
        status, pieces = await wire.post(ask.path, ask.body, _JSON)
        self.ledger.statuses[status] += 1
        async with aclosing(pieces):
            if status != 200 or ask.status != 200:
                await self._refused(ask, status, b"".join([piece async for _, piece in pieces]))
                return
            reply = await self._streamed(wire, ask, pieces) if ask.is_stream else await self._whole(ask, pieces)
        if reply is not None:
            self.latencies.append(asyncio.get_running_loop().time() - started)
            self._judge(ask, reply)

    async def _refused(self, ask: Ask, status: int, body: bytes) -> None:
        is_busy = status == 429 and ask.api is not None
        if status != ask.status and not is_busy:
            self.ledger.wrong.append(f"{ask.kind}: status {status} where {ask.status} was due: {body[:300]!r}")
            return
        message = json.loads(body)["error"]["message"]
        if not message or "Traceback" in message:
            self.ledger.wrong.append(f"{ask.kind}: an error that says nothing fit: {body[:300]!r}")
        self.ledger.refusal(ask, status)
        if is_busy:
            await asyncio.sleep(1 + self._draw.random())

    async def _whole(self, ask: Ask, pieces: Pieces) -> Reply:
        assert ask.api is not None
        body = b"".join([piece async for _, piece in self._counted(pieces)])
        return read_whole(ask.api, json.loads(body))

    async def _streamed(self, wire: Wire, ask: Ask, pieces: Pieces) -> Reply | None:
        """The reply; `None` where the client left before its end."""
        assert ask.api is not None
        reply, patience = Reply(), self._draw.randrange(1, 6)
        reader = EventReader(self._counted(pieces))
        async for event in reader.events():
            self.num_chunks += 1
            if event.data == b"[DONE]":
                reply.has_ended = True
                continue
            read_event(ask.api, reply, event.name, json.loads(event.data))
            patience -= 1
            if patience == 0 and ask.conduct == "leaves":
                self.ledger.left(ask, reply)
                return None
            if patience == 0 and ask.conduct == "aborts":
                await self._abort(reply.id)
            if patience >= 0 and ask.conduct == "dawdles":
                await asyncio.sleep(self._draw.random())
        if reader.rest:
            raise ReplyError(f"the stream ended within an event: {reader.rest[:100]!r}")
        if not reply.has_ended:
            raise ReplyError("the stream ended before the reply did")
        return reply

    async def _counted(self, pieces: Pieces) -> Pieces:
        """The same pieces, counted."""
        async for at, received in pieces:
            self.num_bytes += len(received)
            yield at, received

    async def _abort(self, id: str) -> None:
        async with Wire(self._url, TIMEOUT_S) as wire:
            status, told = await wire.ask("/abort_request", json.dumps({"rid": id}).encode(), _JSON)
        body = json.loads(told)
        if status != 200 or body != {"aborted": 1}:
            self.ledger.wrong.append(f"/abort_request of an open request: {status} {body}")

    async def _walk_off(self, ask: Ask) -> None:
        """Sends the request, or half of it, waits a little, and closes the connection without having read anything."""
        address = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        del reader
        head = f"POST {ask.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(ask.body)}\r\n\r\n"
        is_half = self._draw.random() < 0.2
        writer.write(head.encode() + (ask.body[: len(ask.body) // 2] if is_half else ask.body))
        await writer.drain()
        await asyncio.sleep(self._draw.random())
        writer.close()
        await writer.wait_closed()
        if not is_half:
            self.ledger.walked_off(ask)

    def _judge(self, ask: Ask, reply: Reply) -> None:
        self.ledger.answered(ask, reply)
        for choice in reply.choices.values():
            fault = ask.judge(choice) if ask.judge is not None else None
            if fault is not None:
                self.ledger.wrong.append(f"{ask.kind} ({ask.api}, stream {ask.is_stream}): {fault}"[:500])
        if ask.kind == "sentinel":
            said = f"{reply.choice().reasoning}|{reply.choice().text}"
            self._sentinel = said if self._sentinel is None else self._sentinel
            if said != self._sentinel:
                self.ledger.wrong.append(f"the sentinel got {said!r} instead of {self._sentinel!r}")
