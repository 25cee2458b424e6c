"""/v1/completions: plain prompts, as text or token ids, one or many; echo and log-probabilities as evaluation tools read them.

Owns the request's fields and both wire forms. Knows nothing of the engine beyond `server.generation`. Mounted by `server.app`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, cast

from fastapi import APIRouter, Request, Response
from pydantic import Field

from legato.server.answer.constraint import constrained
from legato.server.answer.events import ContentText
from legato.server.answer.plain import PlainText
from legato.server.api.openai.logprobs import LOGPROB_SIZE, CompletionArrays
from legato.server.api.openai.schema import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    timings_reply,
    usage_reply,
)
from legato.server.api.sampling_fields import NotSupported, SamplingFields, TokenId
from legato.server.api.service import Service
from legato.server.api.streaming import streamed
from legato.server.generation import Answered, ChoiceStep, Generation, Job, new_id
from legato.server.http.errors import ApiError, Documented, reply_of
from legato.server.http.sse import DOCUMENTED, DONE, EventStream, event, json_bytes, unless_disconnected
from legato.server.http.validation import JsonRoute
from legato.types import MAX_LOGPROBS, ParameterError, SamplingParams, TokenLogprob

MAX_PROMPTS = 1024

Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(SamplingFields):
    """Text to go on with."""

    prompt: str | Texts | Ids | Prompts = Field(description="A text, token ids, or a list of either.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Left out: 16. With 0 nothing is generated; with echo that scores the prompt.",
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives beside each token.")
    echo: bool | None = Field(None, description="The text starts with the prompt, and so do the log-probabilities.")
    include_stop_str_in_output: bool | None = Field(None, description="The text ends with the stop string.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer frames a text prompt; left out: yes."
    )
    suffix: NotSupported = None
    prompt_logprobs: NotSupported = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request became: one job per prompt.

    Attributes:
        echo: the text of each prompt, or nothing.
        num_top: alternatives per token, `None` without log-probabilities.
        keeps_tokens: false where max_tokens is 0: the one token that the engine makes is not shown.
    """

    jobs: tuple[Job, ...]
    echo: tuple[str, ...] | None
    num_top: int | None
    keeps_tokens: bool

    def of_choice(self, index: int) -> tuple[int, int]:
        """The number of the prompt that a choice belongs to, and the first choice of that prompt."""
        n = self.jobs[0].params.n
        return index // n, index // n * n


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses={**Documented().responses(), 200: {"content": DOCUMENTED}},
    )
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Goes on with plain text; with `stream` as server-sent chunks."""
        model, id = service.model(request.model), new_id("cmpl")
        size = len(await http.body()) if request.response_format is None else 1 << 30
        with request.own_names():
            made = await service.beside(lambda: _prepare(service, request, id), size)
        if request.stream:
            chunks = _Chunks(service, request, made, model)
            events = streamed(service.generations, made.jobs, chunks, request.own_names())
            return EventStream(events, service.settings.replies.keepalive_s)
        with request.own_names():
            answers, generation = await unless_disconnected(http, service.generations.complete(*made.jobs))
        size = generation.usage.total_tokens * LOGPROB_SIZE if made.num_top is not None else 0
        reply = await service.beside(
            lambda: json_bytes(_whole(service, request, made, model, answers, generation)), size
        )
        return Response(reply, media_type="application/json")

    return routes


def _prepare(service: Service, request: CompletionRequest, id: str) -> Prepared:
    """Tokenizes and checks. Raises `ParameterError`, `ApiError`."""
    tokenizer, limits = service.text.tokenizer, service.settings.limits
    prompts = _prompts(request.prompt)
    service.check_choices(len(prompts), request.n or 1)
    asked = 16 if request.max_tokens is None else request.max_tokens
    params = request.sampling(service.settings.defaults, limits, max(1, asked))
    if asked == 0 and request.min_tokens:
        raise ParameterError("min_tokens", f"{request.min_tokens} is more than max_tokens, 0")
    stop = params.stop
    response_format = None if request.response_format is None else request.response_format.model_dump(by_alias=True)
    params = constrained(
        replace(params, logprobs=request.logprobs, prompt_logprobs=request.logprobs if request.echo else None),
        tokenizer,
        in_reasoning=False,
        response_format=response_format,
    )
    encode = tokenizer.encode if request.add_special_tokens is False else tokenizer.encode_prompt
    jobs: list[Job] = []
    for number, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        if isinstance(prompt, str):
            service.check_text([prompt], name)
            ids = service.check_length(encode(prompt), name)
        else:
            ids = service.check_ids(prompt, name)
        jobs.append(_job(service, request, id, ids, params, stop))
    echo = None
    if request.echo:
        echo = tuple(prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts)
    return Prepared(tuple(jobs), echo, request.logprobs, asked > 0)


def _job(
    service: Service,
    request: CompletionRequest,
    id: str,
    ids: tuple[int, ...],
    params: SamplingParams,
    stop: tuple[str, ...],
) -> Job:
    tokenizer, keep_stop = service.text.tokenizer, bool(request.include_stop_str_in_output)
    return Job(
        id=id,
        prompt=ids,
        params=params,
        reader=lambda: PlainText(tokenizer, stop, keep_stop=keep_stop),
        priority=request.priority or 0,
        timeout_s=request.deadline(service.settings.limits),
        cache_salt=request.cache_salt or "",
    )


def _prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    """A list of prompts; a single text or list of ids is a list of one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return list(cast(Sequence[str | list[int]], prompt))


def _whole(
    service: Service,
    request: CompletionRequest,
    made: Prepared,
    model: str,
    answers: Sequence[Answered],
    generation: Generation,
) -> Completion:
    """The reply in one piece."""
    choices: list[CompletionChoice] = []
    for answer in answers:
        if not made.keeps_tokens:
            answer.token_ids, answer.logprobs, answer.finish_reason, answer.stop = [], [], "length", None
        number, first = made.of_choice(answer.index)
        text = answer.message.content if made.keeps_tokens else ""
        logprobs = None
        if made.num_top is not None:
            arrays = CompletionArrays(service.text.tokenizer, made.num_top)
            before: list[TokenLogprob | None] = generation.prompt_logprobs(first) if made.echo is not None else []
            ids = [*made.jobs[number].prompt, *answer.token_ids] if made.echo is not None else answer.token_ids
            logprobs = arrays.arrays(ids, [*before, *(answer.logprobs or ())])
        choice: CompletionChoice = {
            "index": answer.index,
            "text": (made.echo[number] if made.echo is not None else "") + text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop,
        }
        if request.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = answer.token_ids, list(made.jobs[number].prompt)
        choices.append(choice)
    usage = generation.usage if made.keeps_tokens else replace(generation.usage, completion_tokens=0)
    reply: Completion = {
        "id": made.jobs[0].id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_reply(usage),
    }
    if request.timings:
        reply["timings"] = timings_reply(generation)
    return reply


@dataclass(slots=True)
class _Waiting:
    """What a choice has that its next chunk will carry: text may be held back, and the rest waits for it.

    `scored` are the ids that `logprobs` are of: with echo, those of the prompt too.
    """

    arrays: CompletionArrays
    text: str = ""
    has_begun: bool = False
    prompt: tuple[int, ...] | None = None
    ids: list[int] = field(default_factory=list[int])
    scored: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob | None] = field(default_factory=list["TokenLogprob | None"])


class _Chunks:
    """Writes the chunks of one reply."""

    def __init__(self, service: Service, request: CompletionRequest, made: Prepared, model: str) -> None:
        self._made, self._tokenizer = made, service.text.tokenizer
        self._wants_ids, self._wants_timings = bool(request.return_token_ids), bool(request.timings)
        self._wants_usage, self._wants_usage_always = request.wants_usage, request.wants_usage_always
        self._head = b'data: {"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":[' % (
            json_bytes(made.jobs[0].id),
            int(time.time()),
            json_bytes(model),
        )
        self._waiting: dict[int, _Waiting] = {}

    def said(self, step: ChoiceStep, generation: Generation) -> bytes:
        """The chunk of one step; empty where nothing can be shown yet."""
        made = self._made
        waiting = self._waiting.get(step.index)
        if waiting is None:
            waiting = self._waiting[step.index] = _Waiting(CompletionArrays(self._tokenizer, made.num_top or 0))
        if not step.token_ids and step.finish_reason is None:
            return b""  # a chunk of the prompt, whose log-probabilities are complete with the first new token
        if not waiting.has_begun:
            self._begin(step.index, waiting, generation)
        if made.keeps_tokens:
            waiting.text += "".join(each.text for each in step.events if isinstance(each, ContentText))
            waiting.ids += step.token_ids
            waiting.scored += step.token_ids
            waiting.logprobs += step.logprobs or ()
        if not waiting.text and step.finish_reason is None:
            return b""
        return self._chunk(step, waiting, generation)

    def end(self, generation: Generation) -> bytes:
        """A chunk without choices where usage is wanted, and the mark of the end."""
        if not self._wants_usage:
            return DONE
        return self._head + b"]" + self._usage_field(generation, is_last=True) + b"}\n\n" + DONE

    def fault(self, error: ApiError) -> bytes:
        """An error in place of a chunk, and the mark of the end."""
        return event(json_bytes(reply_of(error))) + DONE

    def _begin(self, index: int, waiting: _Waiting, generation: Generation) -> None:
        waiting.has_begun = True
        number, first = self._made.of_choice(index)
        waiting.prompt = self._made.jobs[number].prompt
        if self._made.echo is not None:
            waiting.text = self._made.echo[number]
            if self._made.num_top is not None:
                waiting.scored += self._made.jobs[number].prompt
                waiting.logprobs += generation.prompt_logprobs(first)

    def _chunk(self, step: ChoiceStep, waiting: _Waiting, generation: Generation) -> bytes:
        logprobs: CompletionLogprobs | None = None
        if self._made.num_top is not None:
            logprobs = waiting.arrays.arrays(waiting.scored, waiting.logprobs)
        extra = b""
        if self._wants_ids:
            extra += b',"token_ids":' + json_bytes(waiting.ids)
            if waiting.prompt is not None:
                extra += b',"prompt_token_ids":' + json_bytes(waiting.prompt)
        reason, stop = step.finish_reason, step.stop
        if reason is not None:
            if not self._made.keeps_tokens:
                reason, stop = "length", None
            extra += b',"stop_reason":' + json_bytes(stop)
        tail = self._usage_field(generation, is_last=False)
        if reason is not None and self._wants_timings:
            tail += b',"timings":' + json_bytes(timings_reply(generation, step.index))
        data = b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._head,
            step.index,
            json_bytes(waiting.text),
            b"null" if logprobs is None else json_bytes(logprobs),
            b"null" if reason is None else json_bytes(reason),
            extra,
            tail,
        )
        waiting.text, waiting.prompt, waiting.ids, waiting.scored, waiting.logprobs = "", None, [], [], []
        return data

    def _usage_field(self, generation: Generation, *, is_last: bool) -> bytes:
        if is_last or self._wants_usage_always:
            usage = generation.usage if self._made.keeps_tokens else replace(generation.usage, completion_tokens=0)
            return b',"usage":' + json_bytes(usage_reply(usage))
        return b',"usage":null' if self._wants_usage else b""
