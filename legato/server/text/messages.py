"""Messages as clients send them, made into the one form that chat templates see.

Owns the shapes of OpenAI's and Anthropic's messages (content parts, reasoning, tool calls, tool results) and what is left out of
a system prompt. Knows nothing of templates or tokens. Called by `server.text.chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, cast

from legato.server.tools.arguments import told_arguments
from legato.server.tools.freeform import arguments_of

Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system", "function": "tool"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that holds it."""
UNSEEN_PARTS = {
    "image": "image", "image_url": "image", "input_image": "image", "document": "document", "file": "file", "input_file": "file",
}  # fmt: skip
"""Types of content parts that a model of text cannot see, and what they are called to its face. One in the last message of a user
is refused; one that stands in the conversation already, or that a tool brought, is told of in words."""
REASONING_PARTS = {"thinking": "thinking", "redacted_thinking": None}
"""Types of content parts that are reasoning, and the field that holds it. Redacted reasoning can be read by nobody here."""
MAX_DEPTH = 8
"""How deep lists and objects in a message are searched for text."""
MAX_KIND = 64
"""Characters of a part's type that a message repeats."""
ATTRIBUTION = re.compile(r"\A\s*x-anthropic-[a-z-]+:[^\n]*\n*", re.IGNORECASE)
"""A line that coding agents put before their system prompt for their own vendor's billing. It differs from request to request, so
that nothing behind it would ever be found in the prefix cache, and it says nothing to a model."""


class ChatError(ValueError):
    """Messages or template arguments that cannot be rendered. The message says which and what is allowed."""


def normal_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All messages: known roles, content as one string, reasoning apart, arguments of calls as objects. Calls of free-form tools
    become those of the functions that the model is shown.

    Content parts of Anthropic's API become what they are in OpenAI's: `thinking` is the message's reasoning, `tool_use` one of
    its calls, and a `tool_result` in a user's message a message of its own, in its place. The attribution line of coding agents
    at the start of a system prompt is left out. A result that is an error is told like any other: templates have no word for it.

    An image or a file that the user sends with the last message is refused. Before that, it is told to the model in words: some
    clients keep what was refused in the conversation, or began it with a model that sees, and could never go on.

    Raises:
        ChatError: a message is not acceptable; names the message and the field.
    """
    last = max((number for number, message in enumerate(messages) if _goes_on(message)), default=-1)
    normal = [
        each
        for number, message in enumerate(messages)
        for each in _normal(message, f"messages[{number}]", is_past=number < last)
    ]
    return _results_by_calls(normal)


def _goes_on(message: Any) -> bool:
    """Whether somebody speaks in a message, so that what a user said before it is past: results of tools alone are no speech."""
    if not isinstance(message, Mapping) or cast(Message, message).get("role") not in ("user", "assistant"):
        return False
    content: Any = cast(Message, message).get("content")
    if not isinstance(content, list | tuple) or not content:
        return True
    parts = cast(Sequence[Any], content)
    return not all(isinstance(part, Mapping) and cast(Message, part).get("type") == "tool_result" for part in parts)


def _results_by_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that follow each other in the order of their calls: a chat template knows them apart by nothing else, and clients
    that run tools side by side send them as they end. Where a result names no call before it, its neighbours stay as they are."""
    places: dict[str | None, int] = {}
    number = count()
    ordered: list[dict[str, Any]] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        turns = list(group)
        if are_results:
            ids = [_key(turn.get("tool_call_id")) for turn in turns]
            if all(id in places for id in ids):
                turns = [turn for _, turn in sorted(zip(ids, turns, strict=True), key=lambda pair: places[pair[0]])]
        for turn in turns:
            for call in turn.get("tool_calls") or () if turn["role"] == "assistant" else ():
                places[_key(call.get("id"))] = next(number)
        ordered += turns
    return ordered


def _key(id: Any) -> str | None:
    return id if isinstance(id, str) else None


def _normal(message: Any, where: str, *, is_past: bool) -> Iterator[dict[str, Any]]:
    """One message, or several where tool results stand among a user's text. `is_past`: somebody has spoken since.

    `<think>` in assistant content is taken apart here, since guarded text no longer shows it to the template.
    """
    if not isinstance(message, Mapping):
        raise ChatError(f"{where}: must be an object with role and content, got {type(message).__name__}")
    normal = dict(cast(Message, message))
    role: Any = normal.get("role")
    role = normal["role"] = SAME_ROLE.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise ChatError(f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r}")
    parts = list(_parts(normal.get("content"), where))
    if role == "user" and is_past:
        parts = [part.in_words() for part in parts]
    if role == "assistant":
        yield _assistant(normal, parts, where)
    elif role == "user" and any(part.type == "tool_result" for part in parts):
        yield from _results_and_text(normal, parts)
    else:
        texts = [part.result if role == "tool" else part.text for part in parts]
        if role == "system" and texts:
            texts[0] = ATTRIBUTION.sub("", texts[0])
        yield {**normal, "content": "".join(texts)}


def unseen(kind: str) -> str:
    """What stands for an image or a file where it is not refused."""
    return f"[{UNSEEN_PARTS[kind]} left out: this model reads text only]"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a content, and its place in the request: clients that find one there take it out and go on."""

    fields: Message
    where: str

    @property
    def type(self) -> str:
        """One that only has text is text."""
        return str(self.fields.get("type", "text"))

    @property
    def text(self) -> str:
        """What it says. Raises `ChatError` for a part of another kind."""
        kind = self.type
        if kind not in TEXT_PARTS:
            name = f".{kind}" if kind.isidentifier() and len(kind) <= MAX_KIND else ""
            raise ChatError(f"{self.where}{name}: only text parts are supported, got {kind[:MAX_KIND]!r}")
        text = self.fields.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise ChatError(f"{self.where}.{TEXT_PARTS[kind]}: must be text, got {type(text).__name__}")
        return text

    def in_words(self) -> _Part:
        """This part, or the words that stand for it."""
        return _Part({"type": "text", "text": unseen(self.type)}, self.where) if self.type in UNSEEN_PARTS else self

    @property
    def result(self) -> str:
        """What it says in the result of a tool. Raises `ChatError` for a part that has no place there."""
        return unseen(self.type) if self.type in UNSEEN_PARTS else self.text


def _parts(content: Any, where: str) -> Iterator[_Part]:
    """The parts of a content; a string is one part of text, `None` (as beside tool calls) is none."""
    if content is None or isinstance(content, str):
        if content:
            yield _Part({"type": "text", "text": content}, f"{where}.content")
        return
    if not isinstance(content, list | tuple):
        raise ChatError(f"{where}.content: must be a string or a list of text parts, got {type(content).__name__}")
    for number, part in enumerate(cast(Sequence[Any], content)):
        place = f"{where}.content[{number}]"
        if not isinstance(part, str | Mapping):
            raise ChatError(f"{place}: only text parts are supported, got {type(part).__name__!r}")
        yield _Part({"type": "text", "text": part} if isinstance(part, str) else cast(Message, part), place)


def _results_and_text(message: dict[str, Any], parts: Sequence[_Part]) -> Iterator[dict[str, Any]]:
    """A user's message that holds results of tools: results and runs of text in their order."""
    text = ""
    for part in parts:
        if part.type != "tool_result":
            text += part.text
            continue
        if text:
            yield {**message, "content": text}
            text = ""
        result = "".join(piece.result for piece in _parts(part.fields.get("content"), f"{part.where}.tool_result"))
        yield {"role": "tool", "tool_call_id": part.fields.get("tool_use_id"), "content": result}
    if text:
        yield {**message, "content": text}


def _assistant(message: dict[str, Any], parts: Sequence[_Part], where: str) -> dict[str, Any]:
    calls = list(cast(Sequence[Any], message.get("tool_calls") or ()))
    thoughts: list[str] = []
    content = ""
    for part in parts:
        fields = part.fields
        if part.type == "tool_use":
            function = {"name": fields.get("name"), "arguments": fields.get("input")}
            calls.append({"id": fields.get("id"), "function": function})
        elif part.type in REASONING_PARTS:
            field = REASONING_PARTS[part.type]
            thoughts.append(str(fields.get(field) or "") if field else "")
        else:
            content += part.text
    reasoning = message.pop("reasoning", None)
    if not isinstance(message.get("reasoning_content"), str):
        message["reasoning_content"] = (
            reasoning if isinstance(reasoning, str) else "".join(thoughts) if thoughts else None
        )
    if message["reasoning_content"] is None:
        del message["reasoning_content"]
        if "</think>" in content:
            before, _, content = content.rpartition("</think>")
            message["reasoning_content"] = before.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = content.lstrip("\n")
    message["content"] = content
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return message


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ChatError(f"{where}: must be an object, got {type(call).__name__}")
    normal = dict(cast(Message, call))
    if normal.get("type") == "custom":
        return _custom_call(normal, where)
    function: Any = normal.get("function") or normal
    if not isinstance(function, Mapping) or not isinstance(cast(Message, function).get("name"), str):
        raise ChatError(f"{where}: must have a function with a name")
    function = dict(cast(Message, function))
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = told_arguments(arguments)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{where}: arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise ChatError(f"{where}: arguments must be a JSON object, got {type(arguments).__name__}")
    return {**normal, "function": {**function, "arguments": dict(cast(Message, arguments or {}))}}


def _custom_call(call: Message, where: str) -> dict[str, Any]:
    """A call of a free-form tool, as one of the function that the model knows."""
    custom: Any = call.get("custom")
    if not isinstance(custom, Mapping):
        raise ChatError(f"{where}.custom: must be an object with name and input, got {type(custom).__name__}")
    fields = cast(Message, custom)
    for name in ("name", "input"):
        if not isinstance(fields.get(name), str):
            raise ChatError(f"{where}.custom.{name}: must be text, got {type(fields.get(name)).__name__}")
    function = {"name": fields["name"], "arguments": arguments_of(fields["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


def texts_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in messages that a model may get to see, as deep as messages go: images and files are no text."""
    if isinstance(value, dict) and str(cast(dict[str, Any], value).get("type")) in UNSEEN_PARTS:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict) and depth < MAX_DEPTH:
        inner = cast(dict[str, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)
        for each in inner:
            yield from texts_in(each, depth + 1)
