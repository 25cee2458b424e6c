"""What the OpenAI routes reply with, as types: the routes build these dictionaries, the OpenAPI document shows them.

Owns the shapes and nothing else. Called by `server.api.openai.chat_reply`, `server.api.openai.completions` and
`server.api.openai.models`.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from legato.server.generation import Generation, Timings, Usage

FinishWord = Literal["stop", "length", "tool_calls", "abort", "deadline"]


class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Of the generated tokens, those inside the reasoning."""

    reasoning_tokens: int


class UsageReply(TypedDict):
    """What was used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsReply(TypedDict):
    """Where the time of a choice (in whole replies: the first) went. `accept_length`: tokens per iteration with drafts."""

    first_token_ms: float
    decode_ms: float
    tokens_per_second: float | None
    steps: int
    drafted: int
    accepted: int
    accept_length: float | None


class FunctionReply(TypedDict):
    """A function to call; `arguments` is JSON text."""

    name: str
    arguments: str


class FunctionCallReply(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class CustomReply(TypedDict):
    """A free-form tool to call; `input` is text as it stands."""

    name: str
    input: str


class CustomCallReply(TypedDict):
    """A call of a free-form tool."""

    id: str
    type: Literal["custom"]
    custom: CustomReply


ToolCallReply = FunctionCallReply | CustomCallReply


class TopLogprob(TypedDict):
    """A token and its log-probability. `bytes`: of its text; `None` for a token without any."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobReply(TopLogprob):
    """The chosen token, with its rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry per generated token, those of reasoning and of tool calls included."""

    content: list[TokenLogprobReply]


class ChatMessageReply(TypedDict):
    """The assistant's turn. The reasoning stands in `reasoning_content`, in `reasoning`, or in both, as the server is set."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatChoice(TypedDict):
    """One answer. `stop_reason`: the stop string that ended it."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    timings: NotRequired[TimingsReply]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    """Of each token: its text, log-probability, rivals by their text, and where its text starts. `None`: nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One text. `stop_reason`: the stop string that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    timings: NotRequired[TimingsReply]


class ModelCard(TypedDict):
    """A model. `max_model_len`: longest prompt and output together, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """The models of this server."""

    object: Literal["list"]
    data: list[ModelCard]


def usage_reply(usage: Usage) -> UsageReply:
    """The usage in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_reply(generation: Generation, index: int = 0) -> TimingsReply:
    """The timings of a choice. Speed is of decoding alone: without the first token and the time before it."""
    timings: Timings = generation.timings(index)
    decoded = timings.tokens - timings.first_tokens
    return {
        "first_token_ms": round(timings.first_token_s * 1e3, 3),
        "decode_ms": round(timings.decode_s * 1e3, 3),
        "tokens_per_second": round(decoded / timings.decode_s, 3) if decoded > 0 and timings.decode_s > 0 else None,
        "steps": timings.steps,
        "drafted": timings.drafted,
        "accepted": timings.accepted,
        "accept_length": None if timings.accept_length is None else round(timings.accept_length, 4),
    }
