"""/v1/chat/completions: the reply to a conversation, whole or as chunks.

Owns the wire format of both; what is said in them comes from one reader, so they agree. Knows nothing of the engine beyond
`server.generation`. Mounted by `server.app`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

from fastapi import APIRouter, Request, Response

from legato.server.answer.events import (
    AnswerMessage,
    ContentText,
    Event,
    ReasoningText,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from legato.server.api.openai.chat_request import ChatJob, ChatRequest, chat_job
from legato.server.api.openai.logprobs import LOGPROB_SIZE, chat_logprobs
from legato.server.api.openai.schema import (
    ChatChoice,
    ChatCompletion,
    ChatMessageReply,
    ToolCallReply,
    timings_reply,
    usage_reply,
)
from legato.server.api.service import Service
from legato.server.api.streaming import streamed
from legato.server.generation import Answered, ChoiceStep, Generation, new_id
from legato.server.http.errors import ApiError, Documented, reply_of
from legato.server.http.sse import DOCUMENTED, DONE, EventStream, event, json_bytes, unless_disconnected
from legato.server.http.validation import JsonRoute
from legato.server.settings import ReasoningFields
from legato.server.tools.freeform import TextReader, text_of
from legato.types import TokenLogprob

NULL = b"null"


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={**Documented().responses(), 200: {"content": DOCUMENTED}},
    )
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        """Goes on with a conversation; with `stream` as server-sent chunks."""
        model, id = service.model(request.model), new_id("chatcmpl")
        size = len(await http.body()) if request.response_format is None and not request.tools else 1 << 30
        with request.own_names():
            made = await service.beside(lambda: chat_job(service, request, id), size)
        if request.stream:
            chunks = _Chunks(service, request, made, model)
            events = streamed(service.generations, [made.job], chunks, request.own_names())
            return EventStream(events, service.settings.replies.keepalive_s)
        with request.own_names():
            answers, generation = await unless_disconnected(http, service.generations.complete(made.job))
        size = generation.usage.completion_tokens * LOGPROB_SIZE if made.num_top is not None else 0
        reply = await service.beside(
            lambda: json_bytes(_whole(service, request, made, model, answers, generation)), size
        )
        return Response(reply, media_type="application/json")

    return routes


def _whole(
    service: Service,
    request: ChatRequest,
    made: ChatJob,
    model: str,
    answers: Sequence[Answered],
    generation: Generation,
) -> ChatCompletion:
    """The reply in one piece."""
    fields = service.settings.replies.reasoning_fields
    choices: list[ChatChoice] = []
    for answer in answers:
        logprobs = None
        if made.num_top is not None:
            logprobs = chat_logprobs(service.text.tokenizer, answer.logprobs or (), made.num_top)
        choice: ChatChoice = {
            "index": answer.index,
            "message": message_reply(answer.message, fields, made.freeform),
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop,
        }
        if request.return_token_ids:
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
    reply: ChatCompletion = {
        "id": made.job.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_reply(generation.usage),
    }
    if request.timings:
        reply["timings"] = timings_reply(generation)
    if request.return_token_ids:
        reply["prompt_token_ids"] = list(made.job.prompt)
    return reply


def message_reply(message: AnswerMessage, fields: ReasoningFields, freeform: Container[str]) -> ChatMessageReply:
    """A whole answer as a message. `content` is null where there are only calls. `freeform`: names of tools that take a text."""
    reply: ChatMessageReply = {"role": "assistant", "content": message.content or (None if message.calls else "")}
    if message.reasoning:
        if fields != "reasoning":
            reply["reasoning_content"] = message.reasoning
        if fields != "reasoning_content":
            reply["reasoning"] = message.reasoning
    if message.calls:
        reply["tool_calls"] = [_call_reply(call, freeform) for call in message.calls]
    return reply


def _call_reply(call: ToolCall, freeform: Container[str]) -> ToolCallReply:
    if call.name in freeform:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Chunks:
    """Writes the chunks of one reply. What does not change is made into bytes once."""

    def __init__(self, service: Service, request: ChatRequest, made: ChatJob, model: str) -> None:
        self._tokenizer, self._num_top = service.text.tokenizer, made.num_top
        self._wants_ids, self._wants_timings = bool(request.return_token_ids), bool(request.timings)
        self._prompt, self._freeform = made.job.prompt, made.freeform
        self._wants_usage, self._wants_usage_always = request.wants_usage, request.wants_usage_always
        fields = service.settings.replies.reasoning_fields
        self._reasoning = [name.encode() for name in ("reasoning_content", "reasoning") if fields in ("both", name)]
        self._head = b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"choices":[' % (
            json_bytes(made.job.id),
            int(time.time()),
            json_bytes(model),
        )
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._usage_field(None) + b"}\n\n"
        self._begun: set[int] = set()
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._ids: dict[int, list[int]] = {}
        self._readers: dict[int, TextReader] = {}
        """Of the free-form calls that are open, by choice."""

    def said(self, step: ChoiceStep, generation: Generation) -> bytes:
        """The chunks of one step; empty where nothing can be shown yet."""
        index = step.index
        deltas = [delta for each in step.events if (delta := self._delta(index, each))]
        if step.logprobs is not None and self._num_top is not None:
            self._logprobs.setdefault(index, []).extend(step.logprobs)
        if self._wants_ids:
            self._ids.setdefault(index, []).extend(step.token_ids)
        if not deltas and step.finish_reason is None:
            return b""
        parts: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            parts.append(self._chunk(index, b'{"role":"assistant","content":""}', self._first_tail(generation)))
        for delta in deltas:
            parts.append(self._chunk(index, delta, self._tail(index, generation)))
        if step.finish_reason is not None:
            parts.append(self._chunk(index, b"{}", self._last_tail(step, generation)))
        return b"".join(parts)

    def end(self, generation: Generation) -> bytes:
        """A chunk without choices where usage is wanted, and the mark of the end."""
        if not self._wants_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._head, json_bytes(usage_reply(generation.usage)), DONE)

    def fault(self, error: ApiError) -> bytes:
        """An error in place of a chunk, and the mark of the end."""
        return event(json_bytes(reply_of(error))) + DONE

    def _chunk(self, index: int, delta: bytes, tail: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b%b' % (self._head, index, delta, tail)

    def _tail(self, index: int, generation: Generation) -> bytes:
        """What follows the delta of a chunk that is not the last of its choice."""
        if self._num_top is None and not self._wants_ids and not self._wants_usage_always:
            return self._plain_tail
        return b',"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (
            self._take_logprobs(index),
            self._take_ids(index),
            self._usage_field(generation),
        )

    def _first_tail(self, generation: Generation) -> bytes:
        ids = b',"prompt_token_ids":' + json_bytes(self._prompt) if self._wants_ids else b""
        return b',"logprobs":null,"finish_reason":null}]%b%b}\n\n' % (self._usage_field(generation), ids)

    def _last_tail(self, step: ChoiceStep, generation: Generation) -> bytes:
        timings = b',"timings":' + json_bytes(timings_reply(generation, step.index)) if self._wants_timings else b""
        return b',"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b%b}\n\n' % (
            self._take_logprobs(step.index),
            json_bytes(step.finish_reason),
            json_bytes(step.stop),
            self._take_ids(step.index),
            self._usage_field(generation),
            timings,
        )

    def _usage_field(self, generation: Generation | None) -> bytes:
        if self._wants_usage_always and generation is not None:
            return b',"usage":' + json_bytes(usage_reply(generation.usage))
        return b',"usage":null' if self._wants_usage else b""

    def _take_logprobs(self, index: int) -> bytes:
        """Those of the tokens since the last chunk of the choice: text may be held back, and they wait for it."""
        waiting = self._logprobs.pop(index, None)
        if self._num_top is None or not waiting:
            return NULL
        return json_bytes(chat_logprobs(self._tokenizer, waiting, self._num_top))

    def _take_ids(self, index: int) -> bytes:
        return b',"token_ids":' + json_bytes(self._ids.pop(index, [])) if self._wants_ids else b""

    def _delta(self, choice: int, each: Event) -> bytes:
        match each:
            case ContentText(text):
                return b'{"content":%b}' % json_bytes(text)
            case ReasoningText(text):
                data = json_bytes(text)
                return b"{" + b",".join(b'"%b":%b' % (name, data) for name in self._reasoning) + b"}"
            case ToolCallStart(index, id, name):
                start = b'{"tool_calls":[{"index":%d,"id":%b,"type":' % (index, json_bytes(id))
                if name in self._freeform:
                    self._readers[choice] = TextReader()
                    return b'%b"custom","custom":{"name":%b,"input":""}}]}' % (start, json_bytes(name))
                return b'%b"function","function":{"name":%b,"arguments":""}}]}' % (start, json_bytes(name))
            case ToolCallArguments(index, text):
                reader = self._readers.get(choice)
                if reader is not None:
                    return _input_delta(index, reader.take(text))
                return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, json_bytes(text))
            case ToolCallEnd(index):
                reader = self._readers.pop(choice, None)
                return b"" if reader is None else _input_delta(index, reader.end())


def _input_delta(index: int, text: str) -> bytes:
    """A piece of the text of a free-form call; empty where there is none."""
    return b'{"tool_calls":[{"index":%d,"custom":{"input":%b}}]}' % (index, json_bytes(text)) if text else b""
