"""Events of an answer, made into the output items of /v1/responses: each as what a stream says of it, and as a whole.

Owns reasoning, message, function_call and custom_tool_call items, their ids, their statuses and the events that build them, so
that a stream and a whole reply agree. Knows nothing of requests, of the response around the items, or of the engine. Driven by
`server.api.responses.reply`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from legato.server.answer.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from legato.server.api.responses.conversation import carried
from legato.server.api.responses.schema import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputTextPart,
    ReasoningItem,
    TextLogprob,
)
from legato.server.api.responses.tools import Home
from legato.server.tools.freeform import TextReader, text_of

Told = tuple[str, dict[str, Any]]
"""An event of a stream: its name without `response.`, and its body without type and number."""


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How reasoning is told: in which field of its item, and whether once more as `encrypted_content`."""

    place: Literal["content", "summary"] = "content"
    is_carried: bool = False


@dataclass(slots=True)
class _Open:
    """The item that is being written. `pieces` are its text or its arguments; `reader`: of a free-form call's text in them."""

    item: OutputItem
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[TextLogprob] = field(default_factory=list[TextLogprob])
    reader: TextReader = field(default_factory=TextReader)


@dataclass(slots=True)
class Items:
    """The items of one response, in the order in which they came; neighbours of one kind are one item.

    Attributes:
        suffix: of the response's id; those of its items are made of it.
        homes: of the request's tools in namespaces, by the names that the model has for them.
        freeform: those names of the tools whose calls are a text.
        done: items that are complete, or as complete as they will be.
    """

    suffix: str
    form: ReasoningForm
    homes: Mapping[str, Home]
    freeform: frozenset[str]
    done: list[OutputItem] = field(default_factory=list["OutputItem"])
    _open: _Open | None = None
    _waiting: list[TextLogprob] = field(default_factory=list[TextLogprob])

    def heed(self, logprob: TextLogprob) -> None:
        """The log-probability of a token of text, told before the events that it brings. It waits for text that is held back."""
        self._waiting.append(logprob)

    def take(self, event: Event) -> list[Told]:
        """What a stream says of an event."""
        match event:
            case ReasoningText(text):
                return [*self._enter("reasoning"), self._reasoning_delta(text)]
            case ContentText(text):
                return [*self._enter("message"), self._text_delta(text)]
            case ToolCallStart(_, id, name):
                told = self.end("completed")
                self._waiting.clear()
                return [*told, self._begin(self._call(id, name))]
            case ToolCallArguments(_, text):
                return self._arguments_delta(text)
            case ToolCallEnd():
                return self.end("completed" if _is_json(self._text()) else "incomplete")

    def end(self, status: ItemStatus) -> list[Told]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item, text = self._open.item, self._text()
        match item["type"]:
            case "reasoning":
                told = self._end_reasoning(item, text)
            case "message":
                told = self._end_message(item, text, self._open.logprobs)
            case "function_call":
                item["arguments"] = text
                told = [("function_call_arguments.done", {**self._place(), "name": item["name"], "arguments": text})]
            case "custom_tool_call":
                told = self._input_delta(self._open.reader.end())
                item["input"] = text_of(text)
                told.append(("custom_tool_call_input.done", {**self._place(), "input": item["input"]}))
        item["status"] = status
        told.append(("output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._open = None
        return told

    # -- one item ------------------------------------------------------------------------------------------------------------

    def _enter(self, kind: Literal["reasoning", "message"]) -> list[Told]:
        """Begins an item of text where none of its kind is open, and its only part."""
        if self._open is not None and self._open.item["type"] == kind:
            return []
        told = self.end("completed")
        if kind == "message":
            told.append(self._begin(self._message()))
            told.append(("content_part.added", {**self._place(), "content_index": 0, "part": _text_part("", [])}))
            return told
        self._waiting.clear()
        told.append(self._begin(self._reasoning()))
        if self.form.place == "summary":
            part = {"type": "summary_text", "text": ""}
            told.append(("reasoning_summary_part.added", {**self._place(), "summary_index": 0, "part": part}))
        else:
            part = {"type": "reasoning_text", "text": ""}
            told.append(("content_part.added", {**self._place(), "content_index": 0, "part": part}))
        return told

    def _begin(self, item: OutputItem) -> Told:
        self._open = _Open(item)
        return "output_item.added", {"output_index": len(self.done), "item": dict(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": "" if self._open is None else self._open.item["id"], "output_index": len(self.done)}

    def _text(self) -> str:
        return "" if self._open is None else "".join(self._open.pieces)

    def _add(self, text: str) -> None:
        if self._open is not None:
            self._open.pieces.append(text)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.suffix}_{len(self.done)}"

    # -- reasoning, messages, calls --------------------------------------------------------------------------------------------

    def _reasoning(self) -> ReasoningItem:
        item: ReasoningItem = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
        if self.form.place == "content":
            item["content"] = []
        return item

    def _reasoning_delta(self, text: str) -> Told:
        self._add(text)
        if self.form.place == "summary":
            return "reasoning_summary_text.delta", {**self._place(), "summary_index": 0, "delta": text}
        return "reasoning_text.delta", {**self._place(), "content_index": 0, "delta": text}

    def _end_reasoning(self, item: ReasoningItem, text: str) -> list[Told]:
        if self.form.is_carried:
            item["encrypted_content"] = carried(text)
        if self.form.place == "summary":
            item["summary"] = [{"type": "summary_text", "text": text}]
            place = {**self._place(), "summary_index": 0}
            return [
                ("reasoning_summary_text.done", {**place, "text": text}),
                ("reasoning_summary_part.done", {**place, "part": item["summary"][0]}),
            ]
        part = {"type": "reasoning_text", "text": text}
        item["content"] = [{"type": "reasoning_text", "text": text}]
        place = {**self._place(), "content_index": 0}
        return [("reasoning_text.done", {**place, "text": text}), ("content_part.done", {**place, "part": part})]

    def _message(self) -> MessageItem:
        return {
            "id": self._id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }

    def _text_delta(self, text: str) -> Told:
        self._add(text)
        logprobs, self._waiting = self._waiting, []
        if self._open is not None:
            self._open.logprobs += logprobs
        return "output_text.delta", {**self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}

    def _end_message(self, item: MessageItem, text: str, logprobs: Sequence[TextLogprob]) -> list[Told]:
        part = _text_part(text, logprobs)
        item["content"] = [part]
        place = {**self._place(), "content_index": 0}
        done = {**place, "text": text, "logprobs": part["logprobs"]}
        return [("output_text.done", done), ("content_part.done", {**place, "part": part})]

    def _call(self, id: str, name: str) -> FunctionCallItem | CustomCallItem:
        item: FunctionCallItem | CustomCallItem
        if name in self.freeform:
            item = {
                "id": self._id("ctc"),
                "type": "custom_tool_call",
                "status": "in_progress",
                "call_id": id,
                "name": name,
                "input": "",
            }
        else:
            item = {
                "id": self._id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": id,
                "name": name,
                "arguments": "",
            }
        home = self.homes.get(name)
        if home is not None:
            item["name"], item["namespace"] = home.name, home.namespace
        return item

    def _arguments_delta(self, text: str) -> list[Told]:
        self._add(text)
        if self._open is not None and self._open.item["type"] == "custom_tool_call":
            return self._input_delta(self._open.reader.take(text))
        return [("function_call_arguments.delta", {**self._place(), "delta": text})]

    def _input_delta(self, text: str) -> list[Told]:
        return [("custom_tool_call_input.delta", {**self._place(), "delta": text})] if text else []


def _text_part(text: str, logprobs: Sequence[TextLogprob]) -> OutputTextPart:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _is_json(text: str) -> bool:
    """Whether a call was written to its end: what the reader leaves unfinished is no JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
