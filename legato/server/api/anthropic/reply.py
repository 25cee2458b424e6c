"""/v1/messages and /v1/messages/count_tokens: the reply to a conversation in Anthropic's form, whole or as events.

Owns the wire format of both; one builder makes the blocks of both, so they agree. Knows nothing of the engine beyond
`server.generation`. Mounted by `server.app`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from legato.server.answer.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from legato.server.api.anthropic.request import MessagesRequest, PromptRequest, messages_job, rendered
from legato.server.api.service import Service
from legato.server.api.streaming import streamed
from legato.server.generation import ChoiceStep, Ending, Generation, Job, new_id
from legato.server.http.errors import ApiError, Documented, anthropic_reply_of
from legato.server.http.sse import DOCUMENTED, EventStream, json_bytes, named_event, unless_disconnected
from legato.server.http.validation import JsonRoute

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingBlock(TypedDict):
    """Reasoning. The signature is empty: nothing is encrypted here, and none is asked for when the block comes back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A call. `input` is empty where the answer was cut inside the call (the stop reason says so)."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = ThinkingBlock | TextBlock | ToolUseBlock


class MessageUsage(TypedDict):
    """Tokens. `input_tokens` are those of the prompt that were not found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(TypedDict):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    """How many tokens a request's prompt has."""

    input_tokens: int
    context_management: NotRequired[None]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=JsonRoute, tags=["Anthropic"])
    faults = Documented(dialect="anthropic").responses()

    @routes.post("/v1/messages", response_model=MessageReply, responses={**faults, 200: {"content": DOCUMENTED}})
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Goes on with a conversation; with `stream` as server-sent events."""
        id = new_id("msg")
        size = len(await http.body()) if not request.tools and request.response_format() is None else 1 << 30
        job = await service.beside(lambda: messages_job(service, request, id), size)
        if request.stream:
            form = _Events(request, job, getattr(http.state, "request_id", None))
            events = streamed(service.generations, [job], form, request.own_names())
            return EventStream(events, service.settings.replies.keepalive_s)
        reply = await unless_disconnected(http, _whole(service, request, job))
        return Response(json_bytes(reply), media_type="application/json")

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount, responses=faults)
    async def count_tokens(request: PromptRequest, http: Request) -> Response:
        """How many tokens the prompt of a request has, exactly: by the template and the tokenizer that would make it."""
        made = await service.beside(lambda: rendered(service, request), len(await http.body()))
        count: TokenCount = {"input_tokens": len(made.prompt.ids)}
        return Response(json_bytes(count), media_type="application/json")

    return routes


@dataclass(slots=True)
class _Open:
    """A block that is being written. `pieces` are its text, or the JSON of its input."""

    block: Block
    pieces: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Blocks:
    """Events of an answer, made into blocks: each as a start, pieces and an end.

    Reasoning, text and calls are blocks in the order in which they came; neighbours of one kind are one block.
    """

    done: list[Block] = field(default_factory=list[Block])
    _open: _Open | None = None

    @property
    def index(self) -> int:
        """Of the open block."""
        return len(self.done)

    def take(self, event: Event) -> list[tuple[str, dict[str, Any]]]:
        """What a stream says of an event: names and bodies of its own events."""
        match event:
            case ReasoningText(text):
                block: Block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._piece(block, text, {"type": "thinking_delta", "thinking": text})
            case ContentText(text):
                return self._piece({"type": "text", "text": ""}, text, {"type": "text_delta", "text": text})
            case ToolCallStart(_, id, name):
                return [*self.end(), self._start({"type": "tool_use", "id": id, "name": name, "input": {}})]
            case ToolCallArguments(_, text):
                return self._delta(text, {"type": "input_json_delta", "partial_json": text})
            case ToolCallEnd():
                return self.end()

    def end(self) -> list[tuple[str, dict[str, Any]]]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        block, text = self._open.block, "".join(self._open.pieces)
        told: list[tuple[str, dict[str, Any]]] = []
        match block["type"]:
            case "thinking":
                block["thinking"] = text
                told = self._delta("", {"type": "signature_delta", "signature": ""})
            case "text":
                block["text"] = text
            case "tool_use":
                block["input"] = _object(text)
        told.append(("content_block_stop", {"index": self.index}))
        self.done.append(block)
        self._open = None
        return told

    def _piece(self, empty: Block, text: str, delta: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        told: list[tuple[str, dict[str, Any]]] = []
        if self._open is None or self._open.block["type"] != empty["type"]:
            told += [*self.end(), self._start(empty)]
        return told + self._delta(text, delta)

    def _start(self, block: Block) -> tuple[str, dict[str, Any]]:
        self._open = _Open(block)
        return "content_block_start", {"index": self.index, "content_block": dict(block)}

    def _delta(self, text: str, delta: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        if self._open is None:  # arguments without a start: the reader makes none
            return []
        self._open.pieces.append(text)
        return [("content_block_delta", {"index": self.index, "delta": delta})]


def _object(text: str) -> dict[str, Any]:
    """The input of a call; the reader writes valid JSON unless the answer was cut."""
    try:
        value: Any = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def _whole(service: Service, request: MessagesRequest, job: Job) -> MessageReply:
    """The reply in one piece."""
    blocks, last = Blocks(), None
    with request.own_names():
        async with service.generations.open(job) as generation:
            async for step in generation:
                for event in step.events:
                    blocks.take(event)
                last = step
    blocks.end()
    reason, sequence = _ending(last, generation, request)
    return {
        **_message(request, job, generation),
        "content": blocks.done,
        "stop_reason": reason,
        "stop_sequence": sequence,
    }


class _Events:
    """The reply in events."""

    def __init__(self, request: MessagesRequest, job: Job, request_id: str | None) -> None:
        self._request, self._job, self._request_id = request, job, request_id
        self._blocks, self._has_begun = Blocks(), False

    def said(self, step: ChoiceStep, generation: Generation) -> bytes:
        """What a step adds."""
        if step.is_empty:
            return b""
        told: list[tuple[str, dict[str, Any]]] = []
        if not self._has_begun:
            self._has_begun = True
            told += [("message_start", {"message": _message(self._request, self._job, generation)}), ("ping", {})]
        told += [said for event in step.events for said in self._blocks.take(event)]
        if step.finish_reason is not None:
            told += self._blocks.end() + _last_words(step, generation, self._request)
        return b"".join(_event(name, body) for name, body in told)

    def end(self, generation: Generation) -> bytes:
        """Nothing: the last step has said it."""
        return b""

    def fault(self, error: ApiError) -> bytes:
        """`error`."""
        return named_event("error", json_bytes(anthropic_reply_of(error, self._request_id)))


def _last_words(step: ChoiceStep, generation: Generation, request: MessagesRequest) -> list[tuple[str, dict[str, Any]]]:
    reason, sequence = _ending(step, generation, request)
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return [("message_delta", {"delta": delta, "usage": _usage(generation)}), ("message_stop", {})]


def _event(name: str, body: dict[str, Any]) -> bytes:
    return named_event(name, json_bytes({"type": name, **body}))


def _message(request: MessagesRequest, job: Job, generation: Generation) -> MessageReply:
    """The message before anything is in it."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(generation),
    }


def _usage(generation: Generation) -> MessageUsage:
    used = generation.usage
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
    }


_REASONS: dict[Ending, StopReason] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def _ending(last: ChoiceStep | None, generation: Generation, request: MessagesRequest) -> tuple[StopReason, str | None]:
    """Why it ended, in this API's words. Raises `ApiError` for an end that it has no word for."""
    finished = None if last is None else last.finish_reason
    if last is None or finished is None or finished == "abort":
        raise ApiError(503, "the request was aborted by the server's operator")
    if finished == "deadline":
        raise ApiError(503, "the request's time was up before its answer was complete")
    if last.stop is not None and finished == "stop":
        return "stop_sequence", last.stop
    if finished == "length" and generation.usage.completion_tokens < request.max_tokens:
        return "model_context_window_exceeded", None
    return _REASONS[finished], None
