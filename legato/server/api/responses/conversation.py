"""The items of a request to /v1/responses, as the conversation that they are.

Owns how items become the messages that chat templates see, and how reasoning goes to a client and back as `encrypted_content`.
Knows nothing of sampling or replies. Called by `server.api.responses.request`; `server.api.responses.output` writes what is read
here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from legato.server.api.responses.input import (
    CustomCall,
    CustomCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    Part,
    ReasoningInput,
    RefusalPart,
    TextPart,
    UnseenPart,
)
from legato.server.api.responses.tools import Home
from legato.server.text.messages import unseen
from legato.server.tools.arguments import told_arguments
from legato.server.tools.freeform import arguments_of
from legato.types import ParameterError

CARRIED = "legato1."
"""What `encrypted_content` of this server starts with. Nothing is secret in it: it is the reasoning, for clients that send back
nothing else."""


def carried(reasoning: str) -> str:
    """Reasoning as `encrypted_content`."""
    return CARRIED + base64.urlsafe_b64encode(reasoning.encode()).decode()


@dataclass(slots=True)
class _Turn:
    """A message, and the place in the request that it comes from. `stage`: how far an assistant's turn has come."""

    message: dict[str, Any]
    origin: str
    stage: int = 0


@dataclass(slots=True)
class Conversation:
    """Items made into messages.

    Reasoning, text and calls that follow each other in this order are one turn of the assistant.
    """

    _turns: list[_Turn] = field(default_factory=list[_Turn])
    _calls: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, instructions: str | None, items: str | Sequence[InputItem]) -> Conversation:
        """The conversation of a request. Raises `ParameterError`, which names the item."""
        made = cls()
        if instructions:
            made._turns.append(_Turn({"role": "system", "content": instructions}, "instructions"))
        if isinstance(items, str):
            made._turns.append(_Turn({"role": "user", "content": items}, "input"))
            return made
        for number, item in enumerate(items):
            made._add(item, f"input[{number}]")
        return made

    @property
    def messages(self) -> list[dict[str, Any]]:
        """OpenAI-style messages."""
        return [turn.message for turn in self._turns]

    def origin(self, number: int) -> str:
        """The field of the request that a message comes from."""
        return self._turns[number].origin

    def _add(self, item: InputItem, where: str) -> None:
        match item:
            case ReasoningInput():
                message = self._assistant(1, where)
                message["reasoning_content"] = message.get("reasoning_content", "") + _reasoning(item, where)
            case InputMessage(role="assistant"):
                self._assistant(2, where)["content"] = _text(item.content)
            case InputMessage():
                self._turns.append(_Turn({"role": item.role, "content": _content(item.content)}, where))
            case FunctionCall() | CustomCall():
                self._calls.add(item.call_id)
                name = item.name if item.namespace is None else Home(item.namespace, item.name).joined
                call = {"id": item.call_id, "function": {"name": name, "arguments": _arguments(item, where)}}
                self._assistant(3, where).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput() | CustomCallOutput():
                if item.call_id not in self._calls:
                    raise ParameterError(
                        f"{where}.call_id", f"there is no call with this id before it, got {item.call_id!r:.80}"
                    )
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                self._turns.append(_Turn(message, where))

    def _assistant(self, stage: int, where: str) -> dict[str, Any]:
        """The turn that takes an item of this stage (reasoning 1, text 2, calls 3): the last one, or a new one."""
        last = self._turns[-1].stage if self._turns else 0
        if not 0 < last <= stage or last == stage == 2:
            self._turns.append(_Turn({"role": "assistant", "content": ""}, where))
        self._turns[-1].stage = stage
        return self._turns[-1].message


def _content(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    """Text; or its parts, where one of them cannot be seen and `text.messages` is to judge it."""
    if isinstance(content, str) or not any(isinstance(part, UnseenPart) for part in content):
        return _text(content)
    return [
        {"type": part.type} if isinstance(part, UnseenPart) else {"type": "text", "text": _told(part)}
        for part in content
    ]


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(map(_told, content))


def _told(part: Part) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case UnseenPart():
            return unseen(part.type)


def _arguments(item: FunctionCall | CustomCall, where: str) -> dict[str, Any]:
    if isinstance(item, CustomCall):
        return arguments_of(item.input)
    try:
        value: Any = told_arguments(item.arguments)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{where}.arguments", f"must be a JSON object as text: {error}") from error
    if not isinstance(value, dict):
        raise ParameterError(f"{where}.arguments", f"must be a JSON object, got {value!r:.80}")
    return cast(dict[str, Any], value)


def _reasoning(item: ReasoningInput, where: str) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content:
        try:
            if not item.encrypted_content.startswith(CARRIED):
                raise ValueError
            return base64.b64decode(
                item.encrypted_content.removeprefix(CARRIED), altchars=b"-_", validate=True
            ).decode()
        except (ValueError, binascii.Error) as error:
            raise ParameterError(
                f"{where}.encrypted_content", "was not written by this server; leave the item out, or send its content"
            ) from error
    return "\n\n".join(part.text for part in item.summary or ())
