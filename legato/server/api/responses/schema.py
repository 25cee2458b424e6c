"""What /v1/responses replies with, as types: the route builds these dictionaries, the OpenAPI document shows them.

Owns the shapes and nothing else. Called by `server.api.responses.reply` and `server.api.responses.output`.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from legato.server.generation import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class TextLogprobTop(TypedDict):
    """A token and its log-probability. `bytes`: of its text."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TextLogprobTop):
    """The chosen token, with its rivals."""

    top_logprobs: list[TextLogprobTop]


class OutputTextPart(TypedDict):
    """Text of the answer. `logprobs`: of its tokens, where the request includes them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TextLogprob]


class MessageItem(TypedDict):
    """What the assistant says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


class ReasoningPart(TypedDict):
    """The reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryPart(TypedDict):
    """The reasoning, whole, where the request asks for a summary: there is no other one."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(TypedDict):
    """Reasoning: its text stands in `content`, or in `summary` where the request asks for one. `encrypted_content` holds it once
    more where the request includes it."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryPart]
    content: NotRequired[list[ReasoningPart]]
    encrypted_content: NotRequired[str]


class FunctionCallItem(TypedDict):
    """A call. `arguments` is JSON text, unfinished where the status is `incomplete`. `namespace`: of the function, where the
    request put it into one."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallItem(TypedDict):
    """A call of a free-form tool. `input` ends early where the status is `incomplete`."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomCallItem


class FunctionToolReply(TypedDict):
    """A tool of the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class CustomToolReply(TypedDict):
    """A free-form tool of the request."""

    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any]


class NamespaceToolReply(TypedDict):
    """A namespace of the request."""

    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[FunctionToolReply | CustomToolReply]


class ReasoningReply(TypedDict):
    """What the request said of reasoning."""

    effort: str | None
    summary: str | None


class TextReply(TypedDict):
    """The form of the answer."""

    format: dict[str, Any]
    verbosity: Literal["medium"]


class InputTokensDetails(TypedDict):
    """Of the prompt's tokens, those found in the prefix cache. None is written for money."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Of the generated tokens, those inside the reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """What was used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(TypedDict):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete: `max_output_tokens`, or the context, is used up."""

    reason: Literal["max_output_tokens"]


class ResponseReply(TypedDict):
    """A response. What the request said comes back with it; what it left out, as it was chosen."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    tools: list[FunctionToolReply | CustomToolReply | NamespaceToolReply]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: ReasoningReply
    text: TextReply
    temperature: float
    top_p: float
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    service_tier: Literal["default"]
    truncation: Literal["disabled"]
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None


def response_usage(usage: Usage) -> ResponseUsage:
    """The usage in this API's form."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
