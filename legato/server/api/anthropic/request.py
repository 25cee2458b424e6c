"""A request to /v1/messages: its fields, and the job that it becomes.

Owns the Anthropic spelling of sampling, tools, thinking and effort, and what is taken from agents that send more than a model
reads. Knows nothing of replies. Called by `server.api.anthropic.reply`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema

from legato.server.answer.constraint import constrained
from legato.server.answer.structure import Answer
from legato.server.api.sampling_fields import NotSupported, checked_stops
from legato.server.api.service import Service
from legato.server.generation import Job
from legato.server.http.validation import MAX_ITEMS, RequestModel, respelled
from legato.server.text.chat_template import ChatError, ChatPrompt, ChatTemplate
from legato.server.text.messages import texts_in
from legato.server.tools.definitions import Tools
from legato.types import ParameterError, SamplingParams

_BLOCKS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
            "description": "Blocks: text, thinking, redacted_thinking, tool_use, tool_result.",
        },
    ]
}
MESSAGE_SCHEMA: dict[str, Any] = {
    "title": "AnthropicMessage",
    "type": "object",
    "properties": {"role": {"type": "string", "enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    "required": ["role", "content"],
}
TOOL_SCHEMA: dict[str, Any] = {
    "title": "AnthropicTool",
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string"},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "description": "JSON schema of the input."},
        "strict": {"type": ["boolean", "null"], "description": "Whether the input must fit it."},
    },
    "required": ["name", "input_schema"],
}
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
ToolDefinition = Annotated[dict[str, Any], WithJsonSchema(TOOL_SCHEMA)]
CLEAR_THINKING = "clear_thinking_20251015"


class ThinkingBudget(RequestModel):
    """Whether the model reasons before it answers. Without this field it does not, as the API has it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Most tokens of reasoning; then it is ended."
    )
    display: Literal["summarized"] | None = Field(None, description="Taken; reasoning is shown as it is.")


class ToolChoice(RequestModel):
    """Which tool must be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(RequestModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None


class OutputConfig(RequestModel):
    """How much the model reasons, and the form of its answer."""

    effort: str | None = Field(
        None, description="low, medium, high, xhigh or max: the nearest that the template knows."
    )
    format: OutputFormat | None = None
    task_budget: NotSupported = None


class Metadata(RequestModel):
    """Taken, and changes nothing."""

    user_id: str | None = None


class PromptRequest(RequestModel):
    """What a prompt is made of: all that /v1/messages/count_tokens takes."""

    model: str = Field(description="Any name is taken: the served model answers, under that name.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingBudget | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The same as output_config.format.")
    cache_control: dict[str, Any] | None = Field(None, description="Taken: every prefix is looked for.")
    context_management: dict[str, Any] | None = Field(
        None, description=f"One edit is known: {CLEAR_THINKING}, which keeps (`all`) or drops earlier reasoning."
    )
    mcp_servers: NotSupported = None
    container: NotSupported = None
    speed: Literal["standard"] | None = None
    betas: list[str] | None = Field(None, description="Taken, and changes nothing.")

    def openai_tools(self) -> Tools | None:
        """The tools and which may be called. Raises `ParameterError` with the fields' names of this API."""
        choice = self.tool_choice
        parallel = (
            None if choice is None or choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
        )
        with _own_names():
            tools = [_openai_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
            return Tools.from_openai(tools, _openai_choice(choice), parallel)

    def template_arguments(self, template: ChatTemplate) -> dict[str, Any]:
        """What the chat template is told. Raises `ChatError`, `ParameterError`."""
        arguments: dict[str, Any] = {}
        if template.can_skip_reasoning:
            arguments["enable_thinking"] = self.reasons
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None and self.reasons:
            arguments |= template.effort(effort)
        clears = self._clears_thinking()
        if clears is not None and "clear_thinking" in template.arguments:
            arguments["clear_thinking"] = clears
        return arguments

    @property
    def reasons(self) -> bool:
        """Whether the model reasons first."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def budget(self, template: ChatTemplate) -> int | None:
        """Most tokens of reasoning: 0 where there shall be none and the template has no switch for it."""
        if not self.reasons:
            return None if template.can_skip_reasoning else 0
        return None if self.thinking is None else self.thinking.budget_tokens

    def response_format(self) -> dict[str, Any] | None:
        """The form of the answer, in OpenAI's words. Raises `ParameterError` where both fields for it are given."""
        nested = None if self.output_config is None else self.output_config.format
        if nested is not None and self.output_format is not None:
            raise ParameterError("output_format", "is the same as output_config.format: give one of them")
        wanted = nested or self.output_format
        if wanted is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}

    def conversation(self) -> list[dict[str, Any]]:
        """All messages, the system prompt first.

        Raises:
            ParameterError: a message has no content, or the answer has already begun.
        """
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("content"), str | list):
                raise ParameterError(f"messages[{number}].content", "is required: a string or a list of blocks")
            for place, block in enumerate(message["content"] if isinstance(message["content"], list) else ()):
                if not isinstance(block, dict):
                    raise ParameterError(
                        f"messages[{number}].content[{place}]",
                        f'must be a block such as {{"type": "text", "text": ...}}, got {block!r:.80}',
                    )
        if self.messages[-1].get("role") == "assistant":
            raise ParameterError(
                f"messages[{len(self.messages) - 1}].role",
                "the last message must not be the assistant's: no answer is continued",
            )
        opening = [] if not self.system else [{"role": "system", "content": self.system}]
        return [*opening, *self.messages]

    def _clears_thinking(self) -> bool | None:
        edits: Any = (self.context_management or {}).get("edits", [])
        where = "context_management.edits"
        if not isinstance(edits, list):
            raise ParameterError(where, f"must be a list, got {type(edits).__name__}")
        clears: bool | None = None
        for number, edit in enumerate(cast(list[Any], edits)):
            fields = cast(Mapping[str, Any], edit) if isinstance(edit, Mapping) else {}
            kind = fields.get("type")
            if kind != CLEAR_THINKING or fields.get("keep") not in (None, "all"):
                raise ParameterError(
                    f"{where}[{number}]",
                    f"only {CLEAR_THINKING} is supported (keep: all or none said), got {kind!r:.80}",
                )
            clears = fields.get("keep") != "all"
        return clears


class MessagesRequest(PromptRequest):
    """A conversation to go on with."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    stop_sequences: list[str] | None = Field(None, description="The text ends before the one that is completed first.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Taken, and changes nothing.")
    inference_geo: NotSupported = None

    def own_names(self) -> AbstractContextManager[None]:
        """Tells what the engine refuses by the names that its fields have in this API."""
        return _own_names("tools" if self.response_format() is None else "output_config.format.schema")

    def sampling(self, service: Service) -> SamplingParams:
        """How to sample; what is left out is as the checkpoint recommends. Raises `ParameterError`."""
        defaults, limits = service.settings.defaults, service.settings.limits
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=max(0, defaults.top_k if self.top_k is None else self.top_k),
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            stop=checked_stops("stop_sequences", self.stop_sequences or [], limits),
        )


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt and the tools that it shows."""

    prompt: ChatPrompt
    tools: Tools | None


def rendered(service: Service, request: PromptRequest) -> Rendered:
    """The prompt of a request. Raises `ParameterError`, `ChatError`, `ApiError`; each names the field."""
    template, tools = service.template, request.openai_tools()
    messages = request.conversation()
    service.check_text(texts_in(messages), "messages")
    try:
        prompt = template.render(
            messages, None if tools is None else tools.definitions, **request.template_arguments(template)
        )
    except ChatError as error:
        raise ChatError(_renumbered(str(error), len(messages) - len(request.messages))) from error
    return Rendered(prompt, tools)


def messages_job(service: Service, request: MessagesRequest, id: str) -> Job:
    """Renders and checks a request. Raises `ParameterError`, `ChatError`, `ApiError`; each names the field."""
    tokenizer, params = service.text.tokenizer, request.sampling(service)
    made = rendered(service, request)
    prompt, tools, stop = made.prompt, made.tools, params.stop
    ids = service.check_length(prompt.ids, "messages")
    # Agents always ask for as much as their own vendor's model may say; here the context may end before that, and says so.
    most = service.room_for(request.max_tokens, len(ids))
    with _own_names():
        params = constrained(
            replace(params, max_tokens=most, reasoning_budget=request.budget(service.template)),
            tokenizer,
            in_reasoning=prompt.in_reasoning,
            tools=tools,
            response_format=request.response_format(),
        )
    return Job(
        id=id,
        prompt=ids,
        params=params,
        reader=lambda: Answer(tokenizer, in_reasoning=prompt.in_reasoning, tools=tools, stop=stop),
        timeout_s=service.settings.limits.timeout_s,
    )


def _openai_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise ParameterError(
            f"{where}.type", f"only custom tools are supported (none runs on this server), got {kind!r:.80}"
        )
    for name in tool:
        if name not in (
            "type",
            "name",
            "description",
            "input_schema",
            "strict",
            "cache_control",
            "eager_input_streaming",
        ):
            raise ParameterError(f"{where}.{name[:64]}", "is not supported")
    if "input_schema" not in tool:
        raise ParameterError(f"{where}.input_schema", "is required")
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _openai_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.name is not None) != (choice.type == "tool"):
        raise ParameterError("tool_choice.name", "belongs to the type tool, and to no other")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


_SPELLING = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema"), "output_config.format"),
)


def _own_names(grammar: str = "tools") -> AbstractContextManager[None]:
    """Faults in fields are told by the names that they have in this API; `grammar`: the field that became one."""
    return respelled((*_SPELLING, (re.compile(r"^(json_schema|regex|grammar)$"), grammar)))


def _renumbered(message: str, shift: int) -> str:
    """A fault in `messages[3]` of the rendered conversation, by the number that the message has in the request."""
    match = re.match(r"messages\[(\d+)\]", message)
    if match is None or not shift:
        return message
    number = int(match[1]) - shift
    return ("system" if number < 0 else f"messages[{number}]") + message[match.end() :]
