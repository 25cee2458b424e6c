"""The items of a request to /v1/responses: messages, calls and their outputs, reasoning.

Owns their shapes, and what is said of an item of another kind. Knows nothing of what they mean together. Called by
`server.api.responses.request`; `server.api.responses.conversation` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from legato.server.api.sampling_fields import NotSupported
from legato.server.http.validation import MAX_ITEMS, SHOWN, RequestModel

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
    """An image or a file. In the output of a call, and in messages before the user's last, the model is told that it cannot see
    it; in the last one it is refused."""

    type: Literal["input_image", "input_file"]
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None


_PARTS = {
    "input_text": "Text",
    "output_text": "Text",
    "refusal": "Refusal",
    "input_image": "Unseen",
    "input_file": "Unseen",
}
Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")] | Annotated[UnseenPart, Tag("Unseen")],
    *_typed(_PARTS),
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
    output: str | list[Part]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: NotSupported = None


class CustomCall(RequestModel):
    """A call of a free-form tool that the assistant made. `id` and `status` are taken, and change nothing."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: str | None = Field(None, min_length=1)
    caller: NotSupported = None
    async_: NotSupported = None
    is_async: NotSupported = Field(None, alias="async")


class CustomCallOutput(RequestModel):
    """What a call of a free-form tool came to. `id`, `status`, `name` and `namespace` are taken, and change nothing."""

    type: Literal["custom_tool_call_output"]
    call_id: str = Field(description="Of a call before it.")
    output: str | list[Part]
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
    "custom_tool_call": "CustomCall",
    "custom_tool_call_output": "CustomCallOutput",
    "reasoning": "Reasoning",
}
InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[CustomCall, Tag("CustomCall")]
    | Annotated[CustomCallOutput, Tag("CustomCallOutput")]
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
