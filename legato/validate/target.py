"""The server under examination: requests as JSON, whole replies and streams, and its counters.

Owns the wire format as far as the checks need it, and what it costs to read a stream back into one message. Called by the checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from legato.bench.load.events import EventReader
from legato.bench.load.facts import samples
from legato.bench.load.wire import Wire

TAGS = re.compile(r"</?think>|<\|(?:user|assistant|system|observation)\|>")
TOOL_TAGS = re.compile(r"</?tool_call>|</?arg_(?:key|value)>")
"""Control tokens of GLM's format: none of them belongs into what a client sees. A call that nobody offered a tool for is text."""

Json = dict[str, Any]


class Unexpected(RuntimeError):
    """The server answered something else than was asked for; the message says what."""


@dataclass(slots=True)
class Answer:
    """One message, from a whole reply or put together from a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list[Json])
    finish_reason: str | None = None
    usage: Json = field(default_factory=dict[str, Any])
    logprobs: list[Json] = field(default_factory=list[Json])
    num_chunks: int = 0

    @property
    def text(self) -> str:
        """Everything that was written, the reasoning first."""
        return self.reasoning + self.content

    @property
    def said(self) -> tuple[str, str, tuple[tuple[str, str], ...], str | None]:
        """What two replies to the same request must agree in; ids of calls are made up anew each time."""
        calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in self.calls)
        return self.reasoning, self.content, calls, self.finish_reason


class Target:
    """A server and how to ask it.

    Args:
        wire: connections to it.
        url: its address, with or without `/v1`.
        model: the name that requests carry.
        key: sent as a bearer token, if not empty.
    """

    def __init__(self, wire: Wire, url: str, model: str, key: str) -> None:
        self._wire = wire
        self._prefix = urlsplit(url.rstrip("/").removesuffix("/v1").rstrip("/")).path
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self.model = model
        self.leaks: list[str] = []
        self.num_empty = self.num_answers = 0

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page."""
        return await self._wire.get(self._prefix + path, self._headers)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to these bytes."""
        return await self._wire.ask(self._prefix + path, body, self._headers)

    async def ask(self, prompt: str | list[Json], **fields: Any) -> Answer:
        """A chat completion, whole. Raises `Unexpected` for anything but a well-formed 200."""
        status, data = await self.post("/v1/chat/completions", self._body(prompt, fields))
        reply = _object(status, data)
        choice = reply["choices"][0]
        message = cast(Json, choice["message"])
        answer = Answer(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            calls=message.get("tool_calls") or [],
            finish_reason=choice.get("finish_reason"),
            usage=reply.get("usage") or {},
            logprobs=(choice.get("logprobs") or {}).get("content") or [],
        )
        self._watch(answer, fields)
        return answer

    async def stream(self, prompt: str | list[Json], **fields: Any) -> Answer:
        """The same, streamed and put together again. Raises `Unexpected`."""
        answer = Answer()
        async with aclosing(self.chunks(prompt, **fields)) as chunks:
            async for chunk in chunks:
                _add(answer, chunk)
        self._watch(answer, fields)
        return answer

    async def chunks(self, prompt: str | list[Json], **fields: Any) -> AsyncGenerator[Json]:
        """The chunks of a stream; closing it closes the connection. Raises `Unexpected`."""
        wanted = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        status, pieces = await self._wire.post(
            self._prefix + "/v1/chat/completions", self._body(prompt, wanted), self._headers
        )
        async with aclosing(pieces):
            if status != 200:
                _object(status, b"".join([piece async for _, piece in pieces]))
            async for event in EventReader(pieces).events():
                if event.data == b"[DONE]":
                    return
                chunk = cast(Json, msgspec.json.decode(event.data))
                if "error" in chunk:
                    raise Unexpected(f"the stream broke off: {_message(chunk)}")
                yield chunk
        raise Unexpected("the stream ended without [DONE]")

    async def counters(self) -> dict[str, float]:
        """Counters and gauges of `/metrics`, summed over labels; those by draft position also as `name@position`."""
        status, data = await self.get("/metrics")
        found: dict[str, float] = {}
        for name, labels, value in samples(data) if status == 200 else []:
            found[name] = found.get(name, 0.0) + value
            if position := re.search(r'position="(\d+)"', labels):
                found[f"{name}@{position[1]}"] = value
        return found

    def _body(self, prompt: str | list[Json], fields: Mapping[str, Any]) -> bytes:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return json.dumps({"model": self.model, "messages": messages, **fields}).encode()

    def _watch(self, answer: Answer, fields: Mapping[str, Any]) -> None:
        self.num_answers += 1
        self.num_empty += answer.finish_reason == "stop" and not answer.content and not answer.calls
        tags = TAGS.findall(answer.content) + (TOOL_TAGS.findall(answer.content) if "tools" in fields else [])
        self.leaks += [f"{tag} in {answer.content[:60]!r}" for tag in tags]


def _object(status: int, data: bytes) -> Json:
    try:
        reply = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise Unexpected(f"{status}: {data[:200]!r} is no JSON") from None
    if status != 200 or not isinstance(reply, dict):
        raise Unexpected(f"{status}: {_message(reply)}")
    return cast(Json, reply)


def _message(reply: Any) -> str:
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _add(answer: Answer, chunk: Json) -> None:
    """Adds one chunk, by the rules that clients follow: pieces of calls join by index, names and ids come once."""
    answer.usage = chunk.get("usage") or answer.usage
    answer.num_chunks += 1
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.logprobs += (choice.get("logprobs") or {}).get("content") or []
        for piece in delta.get("tool_calls") or []:
            while len(answer.calls) <= piece["index"]:
                answer.calls.append({"id": "", "function": {"name": "", "arguments": ""}})
            call = answer.calls[piece["index"]]
            call["id"] += piece.get("id") or ""
            for name in ("name", "arguments"):
                call["function"][name] += (piece.get("function") or {}).get(name) or ""
