"""One request to an OpenAI-compatible endpoint, and the moment at which each piece of its reply came.

Owns the wire format as a client sees it. Uses standard fields only; what servers add (usage in every chunk) is used where it is
offered and never needed. Called by `legato.bench.load.run`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec

from legato.bench.load.events import EventReader
from legato.bench.load.wire import Pieces, Wire, WireError
from legato.config import ConfigError

Api = Literal["chat", "completions"]
Message = Mapping[str, str]
PROBE_TIMEOUT_S = 30.0
_JSON = {"content-type": "application/json", "accept": "text/event-stream"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and how they are made.

    Attributes:
        url: of the server, with or without `/v1`.
        model: the name that requests carry.
        api: `/v1/chat/completions`, or `/v1/completions`.
        headers: sent with every request (a key, for instance).
        max_tokens: most tokens of a reply.
        temperature: `None`: the server's own default.
        usage: which kind of `stream_options` the server takes.
        extra: further fields of every request, as given by the user.
    """

    url: str
    model: str
    api: Api = "chat"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    max_tokens: int = 128
    temperature: float | None = None
    usage: Literal["continuous", "final", "none"] = "continuous"
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def root(self) -> str:
        """The server's address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def path(self) -> str:
        """Where a request is posted, on the server."""
        return self.route("/v1/chat/completions" if self.api == "chat" else "/v1/completions")

    def route(self, path: str) -> str:
        """A path on the server, behind the part of its address that a proxy may have added."""
        return urlsplit(self.root).path + path

    @property
    def where(self) -> str:
        """The whole address of a request."""
        address = urlsplit(self.root)
        return f"{address.scheme}://{address.netloc}{self.path}"

    def body(self, messages: Sequence[Message]) -> bytes:
        """The request as JSON."""
        fields: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": self.max_tokens}
        if self.api == "chat":
            fields["messages"] = list(messages)
        else:
            fields["prompt"] = "\n\n".join(message["content"] for message in messages)
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.usage != "none":
            fields["stream_options"] = {"include_usage": True}
            if self.usage == "continuous":
                fields["stream_options"]["continuous_usage_stats"] = True
        return json.dumps({**fields, **self.extra}).encode()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply: when it came (`time.perf_counter`), and how many tokens it carried, where the server says."""

    at: float
    tokens: int | None


@dataclass(slots=True)
class Reply:
    """What came back. `scheduled`: when the request should have been sent; latencies count from there.

    `completion_tokens` is the server's count, `None` where it gives none; `error` says why there is no (whole) reply.
    """

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    session: int = 0
    turn: int = 0


def extra_fields(text: str) -> dict[str, Any]:
    """The JSON object of `--extra`. Raises ConfigError where it is none."""
    try:
        value: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra must be a JSON object, got {text!r}")
    return cast("dict[str, Any]", value)


class StreamError(RuntimeError):
    """The reply is not what the protocol promises."""


async def ask(wire: Wire, endpoint: Endpoint, messages: Sequence[Message], scheduled: float) -> Reply:
    """Sends one request and follows its reply to the end. Never raises for what the server does: `Reply.error` says it."""
    reply = Reply(scheduled)
    reply.sent = time.perf_counter()
    try:
        status, body = await wire.post(endpoint.path, endpoint.body(messages), {**_JSON, **endpoint.headers})
        async with aclosing(body):
            if status == HTTPStatus.OK:
                await _follow(body, reply)
            else:
                reply.error = f"{status}: {_message(b''.join([piece async for _, piece in body]))}"
    except (WireError, OSError, StreamError, msgspec.DecodeError) as error:  # TimeoutError is an OSError
        reply.error = f"{type(error).__name__}: {error}".rstrip(": ")
    reply.ended = reply.chunks[-1].at if reply.chunks and reply.error is None else time.perf_counter()
    return reply


async def _follow(body: Pieces, reply: Reply) -> None:
    counted, done = 0, False
    async for said in EventReader(body).events():
        at, data = said.at, said.data
        if data == b"[DONE]":
            done = True
            break
        event: Any = msgspec.json.decode(data)
        if not isinstance(event, dict):
            raise StreamError(f"an event is not an object: {data[:80]!r}")
        fields = cast("dict[str, Any]", event)
        if fields.get("error"):
            raise StreamError(_message(data))
        usage = fields.get("usage") or {}
        tokens: int | None = None
        if usage:
            tokens = usage.get("completion_tokens")
            reply.prompt_tokens, reply.completion_tokens = usage.get("prompt_tokens"), tokens
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in fields.get("choices") or ():
            text, is_token = _content(choice)
            reply.text += text
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            if is_token:
                reply.chunks.append(Chunk(at, None if tokens is None else tokens - counted))
                counted = counted if tokens is None else tokens
    if not done and reply.finish_reason is None:
        raise StreamError("the stream ended before the reply did")
    if not reply.chunks:
        raise StreamError("the reply holds no token")


def _content(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """The text that belongs to the answer, and whether the chunk carries any token: text, reasoning or part of a call."""
    if isinstance(choice.get("text"), str):
        return choice["text"], bool(choice["text"])
    delta: Mapping[str, Any] = choice.get("delta") or {}
    text = delta.get("content") or ""
    return text, bool(text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the start of whatever came."""
    try:
        value: Any = msgspec.json.decode(body)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, AttributeError):
        return body[:300].decode("utf-8", "replace")


async def probe(wire: Wire, endpoint: Endpoint) -> Endpoint:
    """The endpoint with the model's name filled in and the richest `stream_options` that the server takes.

    Raises:
        ConfigError: nothing answers there, or a one-token request is refused; the message carries the server's own words.
    """
    if not endpoint.model:
        endpoint = replace(endpoint, model=await _served_model(wire, endpoint))
    short = replace(endpoint, max_tokens=min(endpoint.max_tokens, 2))
    error: str | None = None
    for usage in ("continuous", "final", "none"):
        reply = await ask(wire, replace(short, usage=usage), [{"role": "user", "content": "Hi"}], time.perf_counter())
        if reply.error is None:
            return replace(endpoint, usage=usage)
        error = error or reply.error
        if not reply.error.startswith(("400", "422")):
            break
    raise ConfigError(f"{endpoint.where} refused a first request: {error}")


async def _served_model(wire: Wire, endpoint: Endpoint) -> str:
    where = f"{endpoint.root}/v1/models"
    try:
        status, body = await wire.get(endpoint.route("/v1/models"), endpoint.headers)
    except (WireError, OSError) as error:
        raise ConfigError(f"{where}: no server answers ({error or type(error).__name__})") from error
    if status != HTTPStatus.OK:
        raise ConfigError(f"{where}: {status}: {_message(body)}")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{where}: names no model; give one with --model") from error
