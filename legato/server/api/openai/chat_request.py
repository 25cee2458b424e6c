"""A request to /v1/chat/completions: its fields, and the job that it becomes.

Owns what chat adds to the shared fields (messages, tools, thinking, log-probabilities) and the rendering of the prompt. Knows
nothing of replies. Called by `server.api.openai.chat_reply`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from legato.server.answer.constraint import constrained
from legato.server.answer.structure import Answer
from legato.server.api.sampling_fields import NotSupported, SamplingFields
from legato.server.api.service import Service
from legato.server.generation import Job, Reader
from legato.server.http.validation import MAX_ITEMS, OnlyFalse, OnlyTrue, RequestModel
from legato.server.text.chat_template import ChatError, ChatTemplate
from legato.server.text.messages import texts_in
from legato.server.tools.definitions import Tools, custom_schema
from legato.types import MAX_LOGPROBS, ParameterError

MESSAGE_SCHEMA: dict[str, Any] = {
    "title": "Message",
    "type": "object",
    "description": "A turn of the conversation. Assistant turns may carry `reasoning_content` (or `reasoning`) and `tool_calls`; "
    "fields that the chat template does not read change nothing.",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": ["object", "string"]}, "description": "Text parts."},
                {"type": "null"},
            ]
        },
    },
    "required": ["role"],
}
FUNCTION_SCHEMA: dict[str, Any] = {
    "title": "Tool",
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object", "description": "JSON schema of the arguments."},
                "strict": {"type": ["boolean", "null"], "description": "Whether the arguments must fit it."},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
ToolDefinition = Annotated[
    dict[str, Any], WithJsonSchema({"anyOf": [FUNCTION_SCHEMA, custom_schema("ChatCustomTool", is_nested=True)]})
]


class Thinking(RequestModel):
    """Whether the model reasons first, and for how many tokens at most."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    clear_thinking: bool | None = Field(
        None, description="Whether the reasoning of earlier turns is left out of the prompt."
    )


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Left out: what the context has room for.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The same as max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[ToolDefinition] | None = Field(None, description="Functions and custom (free-form) tools.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`none`, `auto`, `required`, one tool, or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments of the chat template, such as `enable_thinking`. Others are refused."
    )
    reasoning_effort: str | None = Field(
        None,
        description="none, minimal, low, medium, high, xhigh or max: the nearest that the chat template knows, or more.",
    )
    thinking: Thinking | None = None
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Most tokens of reasoning; then it is ended."
    )

    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: OnlyTrue | None = None
    continue_final_message: OnlyFalse | None = None
    echo: OnlyFalse | None = None
    separate_reasoning: OnlyTrue | None = None
    stream_reasoning: OnlyTrue | None = None
    include_reasoning: OnlyTrue | None = None
    include_stop_str_in_output: OnlyFalse | None = None
    audio: NotSupported = None
    chat_template: NotSupported = None
    documents: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    moderation: NotSupported = None
    prediction: NotSupported = None
    prompt_logprobs: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None

    def length(self) -> int | None:
        """Most tokens to generate. Raises `ParameterError` where the two fields for it differ."""
        given = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(given) > 1:
            raise ParameterError(
                "max_completion_tokens", f"is {self.max_completion_tokens}, but max_tokens is {self.max_tokens}"
            )
        return given.pop() if given else None

    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted beside each token; `None`: no log-probabilities. Raises `ParameterError`."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        return None

    def budget(self, template: ChatTemplate) -> int | None:
        """Most tokens of reasoning: 0 where there shall be none and the template has no switch for it.

        Raises:
            ParameterError: the two fields for it differ.
        """
        nested = None if self.thinking is None else self.thinking.budget_tokens
        if None not in (nested, self.thinking_token_budget) and nested != self.thinking_token_budget:
            raise ParameterError(
                "thinking.budget_tokens", f"is {nested}, but thinking_token_budget is {self.thinking_token_budget}"
            )
        is_off = self.reasoning_effort == "none" or (self.thinking is not None and self.thinking.type == "disabled")
        if is_off and not template.can_skip_reasoning:
            return 0
        return self.thinking_token_budget if nested is None else nested

    def template_arguments(self, template: ChatTemplate) -> dict[str, Any]:
        """What the chat template is told.

        Raises:
            ParameterError: a field and `chat_template_kwargs` differ.
            ChatError: the template knows no such effort.
        """
        fields: dict[str, Any] = {}
        if self.reasoning_effort is not None and (self.reasoning_effort != "none" or template.can_skip_reasoning):
            fields |= template.effort(self.reasoning_effort)
        if self.thinking is not None:
            if template.can_skip_reasoning:
                fields.setdefault("enable_thinking", self.thinking.type == "enabled")
            if self.thinking.clear_thinking is not None:
                fields["clear_thinking"] = self.thinking.clear_thinking
        arguments = dict(self.chat_template_kwargs or {})
        for name, value in fields.items():
            if arguments.setdefault(name, value) != value:
                raise ParameterError(
                    f"chat_template_kwargs.{name}",
                    f"is {arguments[name]!r:.80}, but the request also says {value!r:.80}",
                )
        return arguments


@dataclass(frozen=True, slots=True)
class ChatJob:
    """What a chat request became. `freeform`: names of tools whose calls are a text; `num_top`: alternatives per token in the
    reply, `None` without log-probabilities."""

    job: Job
    freeform: frozenset[str]
    num_top: int | None


def chat_job(service: Service, request: ChatRequest, id: str) -> ChatJob:
    """Renders and checks a request.

    Raises:
        ParameterError, ChatError, ApiError: a field cannot be honoured; each names it.
    """
    limits, tokenizer = service.settings.limits, service.text.tokenizer
    service.check_choices(1, request.n or 1)
    tools = Tools.from_openai(request.tools, request.tool_choice, request.parallel_tool_calls)
    num_top = request.num_logprobs()
    params = request.sampling(service.settings.defaults, limits, request.length())
    template = service.template
    service.check_text(texts_in(request.messages), "messages")
    arguments = request.template_arguments(template)
    try:
        prompt = template.render(request.messages, None if tools is None else tools.definitions, **arguments)
    except ChatError as error:
        name = str(error).partition(":")[0]
        if name not in (request.chat_template_kwargs or {}):
            raise
        raise ParameterError(f"chat_template_kwargs.{name}", str(error).partition(": ")[2]) from error
    ids = service.check_length(prompt.ids, "messages")
    service.check_minimum(params.min_tokens, len(ids))
    response_format = None if request.response_format is None else request.response_format.model_dump(by_alias=True)
    stop, in_reasoning = params.stop, prompt.in_reasoning
    params = constrained(
        replace(params, logprobs=num_top, reasoning_budget=request.budget(template)),
        tokenizer,
        in_reasoning=in_reasoning,
        tools=tools,
        response_format=response_format,
    )
    reader: Callable[[], Reader] = lambda: Answer(tokenizer, in_reasoning=in_reasoning, tools=tools, stop=stop)  # noqa: E731
    job = Job(
        id=id,
        prompt=ids,
        params=params,
        reader=reader,
        priority=request.priority or 0,
        timeout_s=request.deadline(limits),
        cache_salt=request.cache_salt or "",
    )
    return ChatJob(job, frozenset() if tools is None else tools.freeform, num_top)
