"""A request to /v1/responses: its fields, and the job that it becomes.

Owns what this API adds to the shared fields (input, instructions, flat tools, reasoning, text formats, what to include) and what
it refuses because nothing is stored. Knows nothing of replies. Called by `server.api.responses.reply`.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from legato.server.answer.constraint import constrained
from legato.server.answer.structure import Answer
from legato.server.api.responses.conversation import Conversation
from legato.server.api.responses.input import InputItems
from legato.server.api.responses.tools import PLACE, FlatTools, ToolOfRequest
from legato.server.api.sampling_fields import (
    NotSupported,
    ResponseGrammar,
    ResponseJson,
    ResponseRegex,
    ResponseText,
    SharedFields,
)
from legato.server.api.service import Service
from legato.server.generation import Job
from legato.server.http.validation import OnlyFalse, RequestModel, respelled
from legato.server.text.chat_template import ChatError, ChatPrompt, ChatTemplate
from legato.server.text.messages import texts_in
from legato.server.tools.definitions import Tools
from legato.types import MAX_LOGPROBS, ParameterError

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class Reasoning(RequestModel):
    """How the model reasons, and where its reasoning stands in the reply."""

    effort: str | None = Field(
        None,
        description="none, minimal, low, medium, high, xhigh or max: the nearest that the template knows, or more.",
    )
    summary: Literal["auto", "detailed"] | None = Field(
        None, description="The reasoning itself, whole, stands in `summary` instead of `content`."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None, description="Whether the model sees its reasoning of earlier turns; `auto`: as its template has it."
    )
    mode: Literal["standard"] | None = None
    generate_summary: NotSupported = None


class SchemaFormat(RequestModel):
    """JSON that fits a schema. It is always enforced, whatever `strict` says."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


Format = Annotated[
    ResponseText | ResponseJson | SchemaFormat | ResponseRegex | ResponseGrammar, Field(discriminator="type")
]


class TextOptions(RequestModel):
    """The form of the answer."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(RequestModel):
    """What a stream says besides the answer."""

    include_obfuscation: bool | None = Field(None, description="Taken, and nothing is padded.")


class ResponsesRequest(SharedFields):
    """What to respond to. Nothing is stored: `input` is the whole conversation."""

    input: str | InputItems
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="An upper bound, reasoning included; the answer is incomplete where the context ends first.",
    )
    tools: list[ToolOfRequest] | None = Field(
        None, description="Functions and custom (free-form) tools, alone or in namespaces."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`none`, `auto`, `required`, one tool, or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Most tokens of reasoning; then it is ended."
    )
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"Needs {LOGPROBS} in `include`.")
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is refused.")
    max_tool_calls: int | None = Field(None, ge=0, description="Of tools that run on a server: there are none here.")
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None,
        Field(max_length=16, description="Comes back in the reply."),
    ] = None
    client_metadata: dict[str, Any] | None = Field(None, description="Taken, and changes nothing.")

    background: OnlyFalse | None = None
    access_programs: NotSupported = None
    background_options: NotSupported = None
    context_management: NotSupported = None
    conversation: NotSupported = None
    image: NotSupported = None
    moderation: NotSupported = None
    previous_response_id: NotSupported = None
    prompt: NotSupported = None
    prompt_cache_options: NotSupported = None
    response_format: NotSupported = None

    def flat_tools(self) -> FlatTools:
        """The tools in one list. Raises `ParameterError`."""
        return FlatTools.of(self.tools or ())

    def function_tools(self, flat: FlatTools) -> Tools | None:
        """The tools and which may be called. Raises `ParameterError` with the fields' names of this API."""
        with _own_names(flat):
            return flat.chosen(self.tool_choice, self.parallel_tool_calls)

    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted beside each token; `None`: no log-probabilities. Raises `ParameterError`."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return None

    @property
    def effort(self) -> str | None:
        """How much the model reasons, as the client said it."""
        return None if self.reasoning is None else self.reasoning.effort

    def budget(self, template: ChatTemplate) -> int | None:
        """Most tokens of reasoning: 0 where there shall be none and the template has no switch for it."""
        return 0 if self.effort == "none" and not template.can_skip_reasoning else self.thinking_token_budget

    def template_arguments(self, template: ChatTemplate) -> dict[str, Any]:
        """What the chat template is told.

        Raises:
            ChatError: the template knows no such effort.
            ParameterError: it has no switch for the reasoning of earlier turns.
        """
        arguments: dict[str, Any] = {}
        if self.effort is not None and (self.effort != "none" or template.can_skip_reasoning):
            arguments |= template.effort(self.effort)
        context = None if self.reasoning is None else self.reasoning.context
        if context in ("current_turn", "all_turns"):
            if "clear_thinking" not in template.arguments:
                raise ParameterError(
                    "reasoning.context", f"this model's chat template has no switch for it, got {context!r}"
                )
            arguments["clear_thinking"] = context == "current_turn"
        return arguments

    def text_format(self) -> dict[str, Any] | None:
        """The form of the answer, as the client said it."""
        wanted = None if self.text is None else self.text.format
        return None if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """What a request became. `freeform`: names of tools whose calls are a text; `num_top`: alternatives per token of the text,
    `None` without log-probabilities."""

    request: ResponsesRequest
    job: Job
    flat: FlatTools
    freeform: frozenset[str]
    num_top: int | None

    def own_names(self) -> AbstractContextManager[None]:
        """Tells what the engine refuses by the names that its fields have in this API."""
        text = self.request.text
        return _own_names(self.flat, None if text is None or text.format is None else text.format.type)


def response_job(service: Service, request: ResponsesRequest, id: str) -> ResponseJob:
    """Renders and checks a request. Raises `ParameterError`, `ChatError`, `ApiError`; each names the field."""
    settings, tokenizer = service.settings, service.text.tokenizer
    num_top = request.num_logprobs()
    params = request.sampling(settings.defaults, settings.limits, request.max_output_tokens)
    flat = request.flat_tools()
    tools = request.function_tools(flat)
    prompt = _rendered(service, request, tools)
    ids, stop, in_reasoning = service.check_length(prompt.ids, "input"), params.stop, prompt.in_reasoning
    service.check_minimum(params.min_tokens, len(ids))
    most, budget = service.room_for(params.max_tokens, len(ids)), request.budget(service.template)
    with _own_names(flat):
        params = constrained(
            replace(params, max_tokens=most, logprobs=num_top, reasoning_budget=budget),
            tokenizer,
            in_reasoning=in_reasoning,
            tools=tools,
            response_format=request.text_format(),
        )
    job = Job(
        id=id,
        prompt=ids,
        params=params,
        reader=lambda: Answer(tokenizer, in_reasoning=in_reasoning, tools=tools, stop=stop),
        priority=request.priority or 0,
        timeout_s=request.deadline(settings.limits),
        cache_salt=request.cache_salt or "",
    )
    return ResponseJob(request, job, flat, frozenset() if tools is None else tools.freeform, num_top)


def _rendered(service: Service, request: ResponsesRequest, tools: Tools | None) -> ChatPrompt:
    template, conversation = service.template, Conversation.of(request.instructions, request.input)
    service.check_text(texts_in(conversation.messages), "input")
    try:
        return template.render(
            conversation.messages,
            None if tools is None else tools.definitions,
            **request.template_arguments(template),
        )
    except ChatError as error:
        raise ChatError(_located(str(error), conversation)) from error


def _located(message: str, conversation: Conversation) -> str:
    """A fault in a message of the rendered conversation, by the name that its item has in the request."""
    match = re.match(r"messages\[(\d+)\]", message)
    if match is None:
        return message.replace("reasoning_effort", "reasoning.effort", 1)
    return conversation.origin(int(match[1])) + message[match.end() :]


_SPELLING = (
    (re.compile(r"^(tools\[\d+\])\.custom\.format\.grammar"), r"\1.format"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.(function|custom|allowed_tools)"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
)


_FORMAT_FIELDS = {"json_schema": ".schema", "regex": ".regex", "grammar": ".grammar"}


def _own_names(flat: FlatTools, kind: str | None = None) -> AbstractContextManager[None]:
    """Faults in fields are told by the names that they have in this API; `kind`: of the text format, which became a grammar."""
    field = "tools" if kind in (None, "text") else "text.format" + _FORMAT_FIELDS.get(kind, "")
    return respelled((*_SPELLING, (PLACE, flat.place_of), (re.compile(r"^(json_schema|regex|grammar)$"), field)))
