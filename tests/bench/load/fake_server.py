"""A server whose timings are known: it speaks the standard fields of the protocol and waits as it is told.

Plain asyncio. In a thread of its own (`with`), or in the event loop of its client (`async with`), where both have one clock.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """How it answers: seconds to the first chunk, between chunks, tokens of each chunk; `one_at_a_time` queues requests."""

    first_s: float = 0.1
    gap_s: float = 0.05
    chunk_tokens: tuple[int, ...] = (1, 1, 1, 1)
    one_at_a_time: bool = False
    continuous: bool = True
    usage: bool = True
    refuse_options: bool = False
    metrics: bool = False
    fail_every: int = 0
    cut_stream: bool = False


@dataclass
class Seen:
    """What it did: per request its body, when it came and when each chunk left."""

    body: dict[str, Any]
    came: float
    left: list[float] = field(default_factory=list)


class FakeServer:
    """Use as a context manager; `url` is where it listens."""

    def __init__(self, script: Script) -> None:
        self.script, self.seen, self.url = script, list[Seen](), ""
        self.drafts = self.accepted = 0
        self._connections = set[asyncio.Task[None]]()
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def __aenter__(self) -> FakeServer:
        self._task = asyncio.create_task(self._serve())
        while not self._ready.is_set():
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop, self._turn = asyncio.Event(), asyncio.Lock()
        server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.lower().split("\r\n")
                        if line.startswith("content-length:")
                    ),
                    0,
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if method == "GET":
                    self._get(path, writer)
                else:
                    await self._post(path, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _plain(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/metrics" and self.script.metrics:
            _plain(
                writer, 200,
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.accepted}.0\n',
            )  # fmt: skip
        else:
            _plain(writer, 404, json.dumps({"error": {"message": "no such route"}}))

    async def _post(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen = Seen(body, time.perf_counter())
        script = self.script
        if script.refuse_options and "stream_options" in body:
            return _plain(writer, 400, json.dumps({"error": {"message": "stream_options is not supported"}}))
        if body["max_tokens"] > 2:  # not the client's probe
            self.seen.append(seen)
            if script.fail_every and len(self.seen) % script.fail_every == 0:
                return _plain(writer, 503, json.dumps({"error": {"message": "try again"}}))
        if script.one_at_a_time:
            async with self._turn:
                await self._stream(path, body, seen, writer)
        else:
            await self._stream(path, body, seen, writer)

    async def _stream(self, path: str, body: dict[str, Any], seen: Seen, writer: asyncio.StreamWriter) -> None:
        script, total = self.script, 0
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        chat = path.endswith("/chat/completions")
        if chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        start = time.perf_counter()
        for number, tokens in enumerate(script.chunk_tokens):
            await asyncio.sleep(max(0.0, start + script.first_s + number * script.gap_s - time.perf_counter()))
            total += tokens
            text = "x" * tokens
            event: dict[str, Any] = {
                "choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]
            }
            if script.continuous and body.get("stream_options", {}).get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": 7, "completion_tokens": total}
            _event(writer, event)
            await writer.drain()
            seen.left.append(time.perf_counter())
            self.drafts, self.accepted = self.drafts + 1, self.accepted + tokens - 1
        if script.cut_stream and body["max_tokens"] > 2:
            raise ConnectionError
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if script.usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 3}}
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")


def _plain(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(value)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
