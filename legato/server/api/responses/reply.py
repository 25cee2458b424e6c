"""/v1/responses: the reply to a conversation in OpenAI's newer form, whole or as events. Nothing is stored.

Owns the response around the output items, its statuses and its events; one object makes both forms, so they agree. Knows nothing
of the engine beyond `server.generation`. Mounted by `server.app`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from legato.server.answer.events import Event
from legato.server.api.openai.logprobs import chat_logprobs
from legato.server.api.responses.output import Items, ReasoningForm, Told
from legato.server.api.responses.request import ENCRYPTED, ResponseJob, ResponsesRequest, response_job
from legato.server.api.responses.schema import (
    CustomToolReply,
    FunctionToolReply,
    ItemStatus,
    NamespaceToolReply,
    ResponseFault,
    ResponseReply,
    ResponseStatus,
    TextLogprob,
    TextLogprobTop,
    response_usage,
)
from legato.server.api.service import Service
from legato.server.api.streaming import streamed
from legato.server.generation import ChoiceStep, Ending, Generation
from legato.server.http.errors import ApiError, Documented
from legato.server.http.sse import DOCUMENTED, EventStream, json_bytes, named_event, unless_disconnected
from legato.server.http.validation import JsonRoute
from legato.server.text.tokenizer import Tokenizer
from legato.types import FinishReason, TokenLogprob

STATUS: dict[Ending, ResponseStatus] = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "abort": "failed",
    "deadline": "failed",
}
FAILED = {
    "abort": "the request was aborted by the server's operator",
    "deadline": "the request's time was up before its answer was complete",
}


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @routes.post(
        "/v1/responses",
        response_model=ResponseReply,
        responses={**Documented().responses(), 200: {"content": DOCUMENTED}},
    )
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Responds to a conversation; with `stream` as server-sent events."""
        model, suffix = service.model(request.model), secrets.token_hex(16)
        size = len(await http.body()) if not request.tools and request.text is None else 1 << 30
        made = await service.beside(lambda: response_job(service, request, f"resp_{suffix}"), size)
        reply = Reply(service.text.tokenizer, request, made, model)
        if request.stream:
            events = streamed(service.generations, [made.job], _Events(reply), made.own_names())
            return EventStream(events, service.settings.replies.keepalive_s)
        await unless_disconnected(http, _whole(service, made, reply))
        return Response(json_bytes(reply.body), media_type="application/json")

    return routes


async def _whole(service: Service, made: ResponseJob, reply: Reply) -> None:
    """Completes the reply."""
    with made.own_names():
        async with service.generations.open(made.job) as generation:
            async for step in generation:
                reply.take(step, generation)


class _Events:
    """The reply in events, numbered."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._number = reply, 0

    def said(self, step: ChoiceStep, generation: Generation) -> bytes:
        """What a step adds."""
        if step.is_empty:
            return b""
        told = [] if self._number else self._reply.begin()
        return self._written(told + self._reply.take(step, generation))

    def end(self, generation: Generation) -> bytes:
        """Nothing: the last step has said it."""
        return b""

    def fault(self, error: ApiError) -> bytes:
        """`response.failed`."""
        return self._written(self._reply.fail(error))

    def _written(self, told: list[Told]) -> bytes:
        parts: list[bytes] = []
        for name, body in told:
            kind = f"response.{name}"
            parts.append(named_event(kind, json_bytes({"type": kind, "sequence_number": self._number, **body})))
            self._number += 1
        return b"".join(parts)


class Reply:
    """One response while it is made. `body` is the whole of it once the last step was taken."""

    def __init__(self, tokenizer: Tokenizer, request: ResponsesRequest, made: ResponseJob, model: str) -> None:
        summary = None if request.reasoning is None else request.reasoning.summary
        form = ReasoningForm("content" if summary is None else "summary", ENCRYPTED in (request.include or ()))
        self._items = Items(made.job.id.partition("_")[2], form, made.flat.homes, made.freeform)
        self._tokenizer, self._num_top = tokenizer, made.num_top
        self._reader = None if made.num_top is None else made.job.reader()
        self.body: ResponseReply = _unanswered(request, made, model)

    def begin(self) -> list[Told]:
        """What a stream says before anything is known of the answer."""
        return [(name, {"response": dict(self.body)}) for name in ("created", "in_progress")]

    def take(self, step: ChoiceStep, generation: Generation) -> list[Told]:
        """What a stream says of a step."""
        told: list[Told] = []
        for logprob, events in self._tokens(step):
            if logprob is not None:
                self._items.heed(logprob)
            told += [said for event in events for said in self._items.take(event)]
        if step.finish_reason is not None:
            told += self._end(step.finish_reason, generation)
        return told

    def fail(self, error: ApiError) -> list[Told]:
        """What a stream says of a fault in the middle of the answer."""
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        fault: Any = {"code": codes.get(error.status, "server_error"), "message": error.message}
        return self._finish("failed", "incomplete", fault)

    def _end(self, reason: Ending, generation: Generation) -> list[Told]:
        status, fault = STATUS[reason], None
        if reason in FAILED:
            fault = ResponseFault(code="server_error", message=FAILED[reason])
        if status == "incomplete":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.body["usage"] = response_usage(generation.usage)
        return self._finish(status, "completed" if status == "completed" else "incomplete", fault)

    def _finish(self, status: ResponseStatus, open_item: ItemStatus, fault: ResponseFault | None) -> list[Told]:
        told = self._items.end(open_item)
        self.body["status"], self.body["error"] = status, fault
        self.body["output"] = self._items.done
        if status == "completed":
            self.body["completed_at"] = int(time.time())
        return [*told, (status, {"response": self.body})]

    def _tokens(self, step: ChoiceStep) -> Iterator[tuple[TextLogprob | None, tuple[Event, ...]]]:
        """The events of a step; where log-probabilities are wanted, token by token, each with its own if it is one of the text.

        A second reader does that: which token brought which event, a step of several does not say.
        """
        reader = self._reader
        if reader is None:
            yield None, step.events
            return
        for token, entry in zip(step.token_ids, step.logprobs or (), strict=True):
            before = reader.phase
            events = reader.push((token,)).events
            is_text = before == "content" == reader.phase and self._tokenizer.token_bytes(token)
            yield self._logprob(entry) if is_text else None, events
        if step.finish_reason is not None:
            reason: FinishReason = "stop" if step.finish_reason == "tool_calls" else step.finish_reason
            yield None, reader.finish(reason).events

    def _logprob(self, entry: TokenLogprob) -> TextLogprob:
        (chosen,) = chat_logprobs(self._tokenizer, (entry,), self._num_top or 0)["content"]
        tops: list[TextLogprobTop] = [
            {"token": top["token"], "logprob": top["logprob"], "bytes": top["bytes"] or []}
            for top in chosen["top_logprobs"]
        ]
        return {
            "token": chosen["token"],
            "logprob": chosen["logprob"],
            "bytes": chosen["bytes"] or [],
            "top_logprobs": tops,
        }


def _unanswered(request: ResponsesRequest, made: ResponseJob, model: str) -> ResponseReply:
    """A response that has not begun: what was asked, and how it is answered."""
    params = made.job.params
    return {
        "id": made.job.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "instructions": request.instructions,
        "tools": _tools(request),
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {
            "effort": request.effort,
            "summary": None if request.reasoning is None else request.reasoning.summary,
        },
        "text": {"format": request.text_format() or {"type": "text"}, "verbosity": "medium"},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": made.num_top or 0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "service_tier": "default",
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
    }


def _tools(request: ResponsesRequest) -> list[FunctionToolReply | CustomToolReply | NamespaceToolReply]:
    """As they were sent, which the request has been checked for, with what they left out."""
    told: list[FunctionToolReply | CustomToolReply | NamespaceToolReply] = []
    for tool in request.tools or ():
        if tool["type"] == "namespace":
            inner = [_tool(each) for each in tool["tools"]]
            told.append(
                {"type": "namespace", "name": tool["name"], "description": tool.get("description"), "tools": inner}
            )
        else:
            told.append(_tool(tool))
    return told


def _tool(tool: Mapping[str, Any]) -> FunctionToolReply | CustomToolReply:
    if tool["type"] == "custom":
        form: dict[str, Any] = tool.get("format") or {"type": "text"}
        return {"type": "custom", "name": tool["name"], "description": tool.get("description"), "format": form}
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters") or None,
        "strict": tool.get("strict") is True,
    }
