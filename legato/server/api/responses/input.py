"""The items of a request to /v1/responses, and the conversation that they are.

Owns the shapes of input items (messages, calls and their outputs, reasoning), how they become the messages that chat templates
see, and how reasoning goes to a client and back as `encrypted_content`. Knows nothing of sampling or replies. Called by
`server.api.responses.request`; `server.api.responses.output` writes what is read here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from legato.server.api.responses.tools import Home
from legato.server.api.sampling_fields import NotSupported
from legato.server.http.validation import MAX_ITEMS, SHOWN, RequestModel
from legato.server.text.messages import unseen
from legato.server.tools.arguments import told_arguments
from legato.types import ParameterError

CARRIED = "legato1."
"""What `encrypted_content` of this server starts with. Nothing is secret in it: it is the reasoning, for clients that send back
nothing else."""

STORED = ": nothing is stored here; send the item itself (clients do with store: false)"

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _typed(types: Mapping[str, str], default: str | None = None) -> tuple[Discriminator, BeforeValidator]:
    """Chooses a model by the field `type`: its values, and the tags of the models. A type that is none of them is told."""

    default_tag = types[default] if default is not None else next(iter(types.values()))

    def tag(value: Any) -> str:
        kind: Any = cast(dict[str, Any], value).get("type") if isinstance(value, dict) else None
        return types.get(kind, default_tag) if isinstance(kind, str) else default_tag

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            kind: Any = cast(dict[str, Any], value).get("type") or default
            if not isinstance(kind, str) or kind not in types:
                known, shown = ", ".join(types), repr(kind)[:SHOWN]
                hint = STORED if kind == "item_reference" else ""
                raise PydanticCustomError(
                    "item_type",
                    "the type must be one of {known}, got {shown}{hint}",
                    {"known": known, "shown": shown, "hint": hint},
                )
        return cast(Any, value)

    return Discriminator(tag), BeforeValidator(check)


class TextPart(RequestModel):
    """Text. `annotations`, `logprobs` and `parsed` of a reply's parts are taken, and change nothing."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class RefusalPart(RequestModel):
    """What the assistant said to decline."""

    type: Literal["refusal"]
    refusal: str


class UnseenPart(RequestModel):
    """An image or a file in the output of a call. The model, which asked for it, is told that it cannot see it."""

    type: Literal["input_image", "input_file"]
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None


_PARTS = {"input_text": "Text", "output_text": "Text", "refusal": "Refusal"}
_OUTPUT_PARTS = {**_PARTS, "input_image": "Unseen", "input_file": "Unseen"}
Part = Annotated[Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], *_typed(_PARTS)]
OutputPart = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")] | Annotated[UnseenPart, Tag("Unseen")],
    *_typed(_OUTPUT_PARTS),
]


class InputMessage(RequestModel):
    """A message. `id`, `status` and `phase` are taken, and change nothing."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(RequestModel):
    """A call that the assistant made. `id`, `status` and `parsed_arguments` are taken, and change nothing. `namespace`: of the
    function, where it has one."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object as text.")
    id: str | None = None
    status: ItemStatus | None = None
    parsed_arguments: Any = None
    namespace: str | None = Field(None, min_length=1)
    caller: NotSupported = None
    async_: NotSupported = None
    is_async: NotSupported = Field(None, alias="async")


class FunctionCallOutput(RequestModel):
    """What a call came to. `id`, `status`, `name` and `namespace` are taken, and change nothing."""

    type: Literal["function_call_output"]
    call_id: str = Field(description="Of a call before it.")
    output: str | list[OutputPart]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: NotSupported = None


class SummaryText(RequestModel):
    """A part of a summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningTextPart(RequestModel):
    """A part of the reasoning itself."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningInput(RequestModel):
    """Earlier reasoning: what `content` says, else `encrypted_content` (of this server), else `summary`."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningTextPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: ItemStatus | None = None


_ITEMS = {
    "message": "Message",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "reasoning": "Reasoning",
}
InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ReasoningInput, Tag("Reasoning")],
    *_typed(_ITEMS, default="message"),
]


def _few(value: Any) -> Any:
    """Refuses long lists before their items are looked at."""
    if isinstance(value, list) and len(cast(list[Any], value)) > MAX_ITEMS:
        raise PydanticCustomError(
            "too_many", "must have at most {most} items, got {number}", {"most": MAX_ITEMS, "number": len(value)}
        )
    return cast(Any, value)


InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(_few)]


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
                self._turns.append(_Turn({"role": item.role, "content": _text(item.content)}, where))
            case FunctionCall():
                self._calls.add(item.call_id)
                name = item.name if item.namespace is None else Home(item.namespace, item.name).joined
                call = {"id": item.call_id, "function": {"name": name, "arguments": _arguments(item, where)}}
                self._assistant(3, where).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                if item.call_id not in self._calls:
                    raise ParameterError(
                        f"{where}.call_id",
                        f"there is no function_call with this id before it, got {item.call_id!r:.80}",
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


def _text(content: str | Sequence[OutputPart]) -> str:
    return content if isinstance(content, str) else "".join(map(_told, content))


def _told(part: OutputPart) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case UnseenPart():
            return unseen(part.type)


def _arguments(item: FunctionCall, where: str) -> dict[str, Any]:
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
