"""Replies of four APIs, whole or streamed, in one form.

Owns what each API calls a text, a call, an end and a usage. Judges nothing. Called by `legato.bench.soak_http.clients`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["chat", "completions", "messages", "responses"]
PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_ANTHROPIC = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}


class ReplyError(Exception):
    """The reply is not what the API promises."""


class QueueFull(Exception):
    """A refusal that came as an event: the engine was busy for longer than the server holds back a stream's status."""


@dataclass(slots=True)
class Used:
    """Tokens, as a reply says."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One answer: `reason` in the words of the OpenAI API, `None` while it goes on."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    reason: str | None = None


@dataclass(slots=True)
class Reply:
    """What has come so far."""

    id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    used: Used | None = None
    has_ended: bool = False

    def choice(self, index: int = 0) -> Choice:
        """The answer with that number."""
        return self.choices.setdefault(index, Choice())


def read_whole(api: Api, body: Mapping[str, Any]) -> Reply:
    """A reply in one piece. Raises `ReplyError`."""
    reply = Reply(id=str(body.get("id", "")), has_ended=True)
    _WHOLE[api](reply, body)
    return reply


def read_event(api: Api, reply: Reply, name: str, data: Mapping[str, Any]) -> None:
    """Takes one event of a stream. Raises `ReplyError` where it tells a fault, `QueueFull` where that is the refusal of a
    request that has not begun."""
    if data.get("error") or name == "error":
        has_begun = any(choice != Choice() for choice in reply.choices.values())
        if (data.get("error") or data).get("type") == "rate_limit_error" and not has_begun:
            raise QueueFull
        raise ReplyError(f"an error in the stream: {data}")
    _EVENT[api](reply, data)


def _whole_openai(reply: Reply, body: Mapping[str, Any]) -> None:
    for item in body["choices"]:
        choice, message = reply.choice(item["index"]), item.get("message") or {}
        choice.text = item["text"] if "text" in item else message.get("content") or ""
        choice.reasoning = message.get("reasoning_content") or ""
        calls = message.get("tool_calls") or ()
        choice.calls = [Call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        choice.reason = item["finish_reason"]
    reply.used = _used_openai(body["usage"])


def _event_openai(reply: Reply, data: Mapping[str, Any]) -> None:
    reply.id = reply.id or data["id"]
    if data.get("usage"):
        reply.used = _used_openai(data["usage"])
    for item in data["choices"]:
        choice, delta = reply.choice(item["index"]), item.get("delta") or {}
        if choice.reason is not None and (item.get("text") or delta):
            raise ReplyError(f"text after the end of choice {item['index']}: {data}")
        choice.text += item.get("text") or delta.get("content") or ""
        choice.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(choice.calls):
                choice.calls.append(Call(call["function"]["name"]))
            choice.calls[call["index"]].arguments += call["function"]["arguments"]
        choice.reason = item["finish_reason"] or choice.reason


def _used_openai(usage: Mapping[str, Any]) -> Used:
    details = usage.get("prompt_tokens_details") or {}
    return Used(usage["prompt_tokens"], details.get("cached_tokens") or 0, usage["completion_tokens"])


def _whole_messages(reply: Reply, body: Mapping[str, Any]) -> None:
    choice = reply.choice()
    for block in body["content"]:
        match block["type"]:
            case "text":
                choice.text += block["text"]
            case "thinking":
                choice.reasoning += block["thinking"]
            case _:
                choice.calls.append(Call(block["name"], json.dumps(block["input"])))
    choice.reason = _ANTHROPIC[body["stop_reason"]]
    reply.used = _used_messages(body["usage"])


def _event_messages(reply: Reply, data: Mapping[str, Any]) -> None:
    choice = reply.choice()
    match data["type"]:
        case "message_start":
            reply.id, reply.used = data["message"]["id"], _used_messages(data["message"]["usage"])
        case "content_block_start" if data["content_block"]["type"] == "tool_use":
            choice.calls.append(Call(data["content_block"]["name"]))
        case "content_block_delta":
            delta = data["delta"]
            choice.text += delta.get("text", "")
            choice.reasoning += delta.get("thinking", "")
            if delta["type"] == "input_json_delta":
                choice.calls[-1].arguments += delta["partial_json"]
        case "message_delta":
            choice.reason = _ANTHROPIC[data["delta"]["stop_reason"]]
            reply.used = _used_messages(data["usage"])
        case "message_stop":
            reply.has_ended = True
        case _:
            pass


def _used_messages(usage: Mapping[str, Any]) -> Used:
    cached = usage["cache_read_input_tokens"]
    return Used(usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached, usage["output_tokens"])


def _whole_responses(reply: Reply, body: Mapping[str, Any]) -> None:
    choice = Choice()
    for item in body["output"]:
        match item["type"]:
            case "message":
                choice.text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                choice.reasoning += "".join(part["text"] for part in item["content"])
            case _:
                choice.calls.append(Call(item["name"], item["arguments"]))
    ending = "length" if body["status"] == "incomplete" else "tool_calls" if choice.calls else "stop"
    if body["status"] not in ("completed", "incomplete"):
        raise ReplyError(f"the status is {body['status']}: {body.get('error')}")
    choice.reason = ending
    reply.choices[0] = choice
    usage = body["usage"]
    reply.used = Used(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])


def _event_responses(reply: Reply, data: Mapping[str, Any]) -> None:
    match data["type"]:
        case "response.created":
            reply.id = data["response"]["id"]
        case "response.output_text.delta":
            reply.choice().text += data["delta"]
        case "response.completed" | "response.incomplete" | "response.failed":
            streamed = reply.choice().text
            _whole_responses(reply, data["response"])
            if reply.choice().text != streamed:
                raise ReplyError(f"streamed {streamed!r}, and in the end {reply.choice().text!r}")
            reply.has_ended = True
        case _:
            pass


_WHOLE: dict[Api, Callable[[Reply, Mapping[str, Any]], None]] = {
    "chat": _whole_openai,
    "completions": _whole_openai,
    "messages": _whole_messages,
    "responses": _whole_responses,
}
_EVENT: dict[Api, Callable[[Reply, Mapping[str, Any]], None]] = {
    "chat": _event_openai,
    "completions": _event_openai,
    "messages": _event_messages,
    "responses": _event_responses,
}
