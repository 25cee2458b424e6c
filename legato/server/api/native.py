"""/generate in SGLang's form: text or token ids, `sampling_params`, cumulative text, `meta_info`.

Owns that form, for benchmarks and tools that speak it. Knows nothing of the engine beyond `server.generation`. Mounted by
`server.app`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from legato.server.answer.constraint import constrained
from legato.server.answer.plain import PlainText
from legato.server.api.openai.completions import MAX_PROMPTS, Ids, Prompts, Texts
from legato.server.api.openai.logprobs import finite, token_text
from legato.server.api.sampling_fields import LogitBias, SamplingFields, StopIds
from legato.server.api.service import Service
from legato.server.api.streaming import streamed
from legato.server.generation import Answered, ChoiceStep, Generation, Job, new_id
from legato.server.http.errors import ApiError, Documented, reply_of
from legato.server.http.sse import DOCUMENTED, DONE, EventStream, event, json_bytes, unless_disconnected
from legato.server.http.validation import JsonRoute, OnlyFalse, OnlyTrue, RequestModel, known_fields, respelled
from legato.types import MAX_LOGPROBS, ParameterError, TokenLogprob

T = TypeVar("T")


class NativeSampling(RequestModel):
    """How to sample. What is left out is as the checkpoint recommends, and 128 tokens long at most."""

    max_new_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    min_new_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    json_schema: str | None = Field(None, description="A JSON schema as text.")
    regex: str | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = Field(None, description="The text ends with the stop string.")

    def fields(self) -> SamplingFields:
        """The same in the words of the OpenAI routes."""
        own = {"max_new_tokens", "min_new_tokens", "sampling_seed", "json_schema", "regex", "no_stop_trim"}
        shared = self.model_dump(exclude_none=True, exclude=own)
        return SamplingFields.model_validate({**shared, "min_tokens": self.min_new_tokens, "seed": self.sampling_seed})


_SPELLING = (
    (re.compile(r"^id$"), "rid"),
    (re.compile(r"^(min|max)_tokens$"), r"\1_new_tokens"),
    (re.compile(r"^seed$"), "sampling_seed"),
    (re.compile(rf"^(?=({'|'.join(known_fields(NativeSampling))})\b)"), "sampling_params."),
)
"""What is wrong with a field of the engine's is told by its name here."""


class GenerateRequest(RequestModel):
    """A prompt, or several."""

    text: str | Texts | None = None
    input_ids: Ids | Prompts | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(max_length=MAX_PROMPTS)] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1: of the output only.")
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    lora_path: None = Field(None, description="Not supported: leave it out.")
    return_hidden_states: OnlyFalse | None = None
    return_routed_experts: OnlyFalse | None = None


class FinishInfo(TypedDict):
    """Why it ended, and the stop string or the length."""

    type: str
    matched: str | None
    length: int | None


class MetaInfo(TypedDict, total=False):
    """About one answer. Log-probabilities are triples: value, token id, text (or null)."""

    id: str
    finish_reason: FinishInfo | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    spec_verify_ct: int
    spec_accept_length: float | None
    input_token_logprobs: list[tuple[float | None, int, str | None]]
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    output_top_logprobs: list[list[tuple[float | None, int, str | None]]]


class Generated(TypedDict):
    """One answer. In a stream `text` and `output_ids` are all so far, and `index` says of which prompt or sample."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks to know. `start`: first position of the prompt whose log-probability is wanted."""

    jobs: tuple[Job, ...]
    num_top: int | None
    start: int | None
    with_text: bool
    is_single: bool
    arrived: float


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=JsonRoute, tags=["SGLang"])

    @routes.post(
        "/generate",
        response_model=Generated | list[Generated],
        responses={**Documented().responses(), 200: {"content": DOCUMENTED}},
    )
    async def generate(request: GenerateRequest, http: Request) -> Response:
        """Goes on with text or token ids. One prompt and one sample give an object, several give a list."""
        size = len(await http.body())
        with respelled(_SPELLING):
            wanted = await service.beside(lambda: _prepare(service, request), size)
        if request.stream:
            events = streamed(service.generations, wanted.jobs, _Cumulative(service, wanted), respelled(_SPELLING))
            return EventStream(events, service.settings.replies.keepalive_s)
        with respelled(_SPELLING):
            answers, generation = await unless_disconnected(http, service.generations.complete(*wanted.jobs))
        replies = [_generated(service, wanted, answer, generation) for answer in answers]
        return Response(json_bytes(replies[0] if wanted.is_single else replies), media_type="application/json")

    return routes


def _prepare(service: Service, request: GenerateRequest) -> _Wanted:
    arrived = time.monotonic()
    if (request.text is None) == (request.input_ids is None):
        raise ParameterError("text", "give either text or input_ids")
    name = "text" if request.text is not None else "input_ids"
    given: Any = request.text if request.text is not None else request.input_ids
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Any] = list(given) if is_batch else [given]
    sampling = request.sampling_params or NativeSampling.model_validate({})
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    if len(each) != len(prompts):
        raise ParameterError("sampling_params", f"{len(each)} for {len(prompts)} prompts: give one, or one for each")
    if len({one.n or 1 for one in each}) > 1:
        raise ParameterError("sampling_params", "n must be the same for all prompts")
    service.check_choices(len(prompts), each[0].n or 1)
    num_top = (request.top_logprobs_num or 0) if request.return_logprob else None
    start = None
    if num_top is not None and request.logprob_start_len is not None and request.logprob_start_len >= 0:
        start = request.logprob_start_len
    id = request.rid or new_id("gen")
    jobs: list[Job] = []
    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        place = f"{name}[{number}]" if is_batch else name
        if isinstance(prompt, str):
            service.check_text([prompt], place)
            ids = service.check_length(service.text.tokenizer.encode_prompt(prompt), place)
        else:
            ids = service.check_ids(prompt, place)
        jobs.append(_job(service, request, one, id, ids, None if start is None else num_top, num_top))
    is_single = not is_batch and (each[0].n or 1) == 1
    return _Wanted(tuple(jobs), num_top, start, bool(request.return_text_in_logprobs), is_single, arrived)


def _job(
    service: Service,
    request: GenerateRequest,
    sampling: NativeSampling,
    id: str,
    ids: tuple[int, ...],
    prompt_top: int | None,
    num_top: int | None,
) -> Job:
    limits, tokenizer = service.settings.limits, service.text.tokenizer
    params = sampling.fields().sampling(service.settings.defaults, limits, sampling.max_new_tokens or 128)
    service.check_minimum(params.min_tokens, len(ids))
    stop, keep_stop = params.stop, bool(sampling.no_stop_trim)
    params = replace(
        params,
        logprobs=num_top,
        prompt_logprobs=prompt_top,
        json_schema=sampling.json_schema,
        regex=sampling.regex,
    )
    return Job(
        id=id,
        prompt=ids,
        params=constrained(params, tokenizer, in_reasoning=False),
        reader=lambda: PlainText(tokenizer, stop, keep_stop=keep_stop),
        priority=request.priority or 0,
        timeout_s=limits.timeout_s,
    )


class _Cumulative:
    """Every event holds all of its answer so far."""

    def __init__(self, service: Service, wanted: _Wanted) -> None:
        self._service, self._wanted = service, wanted
        self._answers: dict[int, Answered] = {}

    def said(self, step: ChoiceStep, generation: Generation) -> bytes:
        """The answer with the step in it."""
        answer = self._answers.setdefault(step.index, Answered(step.index))
        answer.add(step)
        if not step.events and step.finish_reason is None:
            return b""
        answer.message = generation.message(step.index)
        reply = _generated(self._service, self._wanted, answer, generation)
        if step.finish_reason is None:
            reply["meta_info"]["finish_reason"] = None
        return event(json_bytes(reply))

    def end(self, generation: Generation) -> bytes:
        """The mark of the end."""
        return DONE

    def fault(self, error: ApiError) -> bytes:
        """An error in place of an answer, and the mark of the end."""
        return event(json_bytes(reply_of(error))) + DONE


def _generated(service: Service, wanted: _Wanted, answer: Answered, generation: Generation) -> Generated:
    n = wanted.jobs[0].params.n
    job = wanted.jobs[answer.index // n]
    timings = generation.timings(answer.index)
    length = len(answer.token_ids) if answer.finish_reason == "length" else None
    meta: MetaInfo = {
        "id": job.id,
        "finish_reason": {"type": answer.finish_reason, "matched": answer.stop, "length": length},
        "prompt_tokens": len(job.prompt),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": generation.cached_tokens(answer.index),
        "e2e_latency": time.monotonic() - wanted.arrived,
        "spec_verify_ct": timings.rounds,
        "spec_accept_length": timings.accept_length,
    }
    if wanted.num_top is not None:
        triple = _Triples(service, wanted.with_text)
        entries = answer.logprobs or []
        meta["output_token_logprobs"] = triple.chosen(answer.token_ids, entries)
        if wanted.num_top:
            meta["output_top_logprobs"] = [triple.rivals(entry, wanted.num_top) for entry in entries]
        if wanted.start is not None:
            before = generation.prompt_logprobs(answer.index // n * n)
            meta["input_token_logprobs"] = triple.chosen(job.prompt[wanted.start :], before[wanted.start :])
    return {
        "text": answer.message.content,
        "output_ids": list(answer.token_ids),
        "meta_info": meta,
        "index": answer.index,
    }


@dataclass(frozen=True, slots=True)
class _Triples:
    """Log-probabilities as (value, id, text)."""

    service: Service
    with_text: bool

    def chosen(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> list[tuple[float | None, int, str | None]]:
        """Of the tokens themselves."""
        return [
            (None if entry is None else finite(entry.logprob), token, self._text(token))
            for token, entry in zip(ids, entries)
        ]

    def rivals(self, entry: TokenLogprob, num_top: int) -> list[tuple[float | None, int, str | None]]:
        """Of the best alternatives."""
        return [(finite(logprob), token, self._text(token)) for token, logprob in entry.top[:num_top]]

    def _text(self, token: int) -> str | None:
        return token_text(self.service.text.tokenizer, token) if self.with_text else None
