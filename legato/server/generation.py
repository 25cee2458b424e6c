"""From a prompt to the events of its answers, whatever the API that asked: the one road to the engine.

Owns the `n` samples of a job, their merging, what is used and how long it takes, and that a job which is left early is aborted.
Knows no HTTP and no dialect. The routes call it; they open a job with `async with`, iterate, and say it in their own form.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import TracebackType
from typing import Literal, Protocol, Self, cast

import msgspec

from legato.engine.messages import Progress
from legato.server.answer.events import AnswerMessage, Event, Phase, Step
from legato.server.engine.client import GenerationRequest, RequestRefused
from legato.server.telemetry.meter import RequestMeter
from legato.server.telemetry.metrics import Metrics
from legato.types import FinishReason, ParameterError, SamplingParams, TokenLogprob, samples_of

Ending = Literal["stop", "length", "tool_calls", "abort", "deadline"]
"""Why a choice ended: as the engine says it, or `tool_calls` where it stopped after calling tools."""


class Reader(Protocol):
    """Turns the token ids of one answer into events (`server.answer.Answer`, or `server.plain_text.PlainText`)."""

    @property
    def phase(self) -> Phase: ...

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def has_tool_calls(self) -> bool: ...

    @property
    def message(self) -> AnswerMessage: ...

    def push(self, ids: Iterable[int], /) -> Step: ...

    def finish(self, reason: FinishReason, /) -> Step: ...


class Engine(Protocol):
    """What is needed of `server.client.EngineClient`."""

    def generate(self, request: GenerationRequest, /) -> AsyncIterator[Progress]: ...

    async def abort(self, id: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how it is answered.

    Attributes:
        id: of the reply; unique among open jobs.
        prompt: token ids.
        params: how to sample, `n` choices; of its stop strings, which the reader finds, a reply names the one that was met.
        reader: makes the reader of one choice, in the state that the prompt leaves it in.
        priority: higher ones run first.
        timeout_s: it ends then with the reason "deadline".
        cache_salt: prefixes are shared with jobs of the same salt only.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    reader: Callable[[], Reader]
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a job: the prompt counts once, whatever `n`. End tokens that were generated count."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a choice went, as the server saw it. Accept length and speed are apart: one is no part of the other.

    Attributes:
        first_token_s: from arrival to the first token: queue and prefill.
        decode_s: from the first token to the last.
        tokens: all of them; `first_tokens` came with the first.
        steps: replies of the engine that brought tokens.
        rounds: of those, iterations that verified drafts.
        drafted, accepted: drafts that were verified, and those that the model agreed with.
    """

    first_token_s: float
    decode_s: float
    tokens: int
    first_tokens: int
    steps: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def accept_length(self) -> float | None:
        """Tokens per iteration that verified drafts; `None` without one."""
        return 1 + self.accepted / self.rounds if self.rounds else None


class ChoiceStep(msgspec.Struct, frozen=True):
    """What one iteration brought to one choice. `finish_reason` is set on its last one; `stop` then is the stop string, if any.

    `logprobs` has one entry per token id where they were asked for.
    """

    index: int
    events: tuple[Event, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: Ending | None = None
    stop: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it brought nothing to the choice: the engine has taken the request, or another part of its prompt has run."""
        return not self.token_ids and not self.events and self.finish_reason is None


@dataclass(slots=True)
class Answered:
    """A whole choice: what was said, by the same reader that makes the events of a stream."""

    index: int
    message: AnswerMessage = field(default_factory=lambda: AnswerMessage("", "", ()))
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] | None = None
    finish_reason: Ending = "abort"
    stop: str | None = None

    def add(self, step: ChoiceStep) -> None:
        """Takes the next step."""
        self.token_ids += step.token_ids
        if step.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(step.logprobs)
        if step.finish_reason is not None:
            self.finish_reason, self.stop = step.finish_reason, step.stop


class Generations:
    """Opens jobs, and ends them by name."""

    def __init__(self, engine: Engine, end_ids: Iterable[int], metrics: Metrics) -> None:
        self._engine, self._end_ids, self._metrics = engine, tuple(sorted(end_ids)), metrics
        self._open: dict[str, Generation] = {}

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def open(self, *jobs: Job) -> Generation:
        """Jobs to be entered with `async with` and iterated as one; leaving early aborts them.

        The choices are numbered through: those of the first job, then those of the second. The first job's id is that of all.

        Raises:
            ParameterError: `id` is that of an open job, which goes on (when entered).

        Raises (while iterating):
            RequestRefused: the engine does not take it.
            EngineFailed: the engine failed before it had ended.
        """
        choices: list[_Choice] = []
        for job in jobs:
            ends = () if job.params.ignore_eos else self._end_ids
            for number, params in enumerate(samples_of(replace(job.params, stop=()))):
                id = f"{jobs[0].id}/{len(choices)}"
                request = _request(job, id, params if number == 0 else replace(params, prompt_logprobs=None), ends)
                choices.append(_Choice(self._engine, self._metrics, len(choices), request, job))
        return Generation(jobs, choices, self._open)

    async def complete(self, *jobs: Job) -> tuple[list[Answered], Generation]:
        """Jobs from start to end: all choices, and the generation for its usage and timings. Raises as `open`."""
        async with self.open(*jobs) as generation:
            answers = [Answered(index) for index in range(generation.num_choices)]
            async for step in generation:
                answers[step.index].add(step)
        for answer in answers:
            answer.message = generation.message(answer.index)
        return answers, generation

    async def abort(self, id: str | None = None) -> int:
        """Ends a job by its id, or all of them; returns how many that were. Their choices finish with "abort"."""
        ended = [job for job in self._open.values() if id is None or job.id == id]
        for generation in ended:
            for engine_id in generation.engine_ids:
                await self._engine.abort(engine_id)
        return len(ended)


class Generation:
    """Jobs on their way: iterate the steps; `usage` and `timings` are true at any time."""

    def __init__(self, jobs: Sequence[Job], choices: Sequence[_Choice], opened: dict[str, Generation]) -> None:
        self.id = jobs[0].id
        self._jobs, self._choices, self._open = jobs, choices, opened
        self._steps = choices[0].run() if len(choices) == 1 else self._merged()

    @property
    def num_choices(self) -> int:
        """Over all jobs."""
        return len(self._choices)

    @property
    def engine_ids(self) -> list[str]:
        """Of the engine's requests, one per choice."""
        return [choice.request.id or "" for choice in self._choices]

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = accumulate((job.params.n for job in self._jobs[:-1]), initial=0)
        return Usage(
            prompt_tokens=sum(len(job.prompt) for job in self._jobs),
            cached_tokens=sum(self._choices[first].cached_tokens for first in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            reasoning_tokens=sum(choice.reader.reasoning_tokens for choice in self._choices),
        )

    def prompt_logprobs(self, index: int = 0) -> list[TokenLogprob | None]:
        """Of the tokens of a job's prompt, where they were asked for; `None` for the first. Complete as soon as a step of any
        choice of the job brings tokens or its end. `index`: of the job's first choice."""
        return self._choices[index].prompt_logprobs

    def cached_tokens(self, index: int = 0) -> int:
        """Tokens of a choice's prompt that were found in the prefix cache."""
        return self._choices[index].cached_tokens

    def message(self, index: int = 0) -> AnswerMessage:
        """What one choice has said so far."""
        return self._choices[index].reader.message

    def timings(self, index: int = 0) -> Timings:
        """Where the time of one choice went so far."""
        return self._choices[index].timings

    async def __aenter__(self) -> Self:
        if self.id in self._open:
            raise ParameterError(
                "id", f"{self.id!r} is that of another request, which has not ended: give each its own"
            )
        self._open[self.id] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._steps.aclose()
        finally:
            self._open.pop(self.id, None)

    def __aiter__(self) -> AsyncIterator[ChoiceStep]:
        return self._steps

    async def _merged(self) -> AsyncGenerator[ChoiceStep]:
        """The steps of all choices as they come, but none before the prompt of its job is scored. The first fault ends all."""
        arrived: asyncio.Queue[ChoiceStep | BaseException | None] = asyncio.Queue()

        async def pump(choice: _Choice, scored: asyncio.Event) -> None:
            try:
                async with aclosing(choice.run()) as steps:
                    async for step in steps:
                        if choice.request.params.prompt_logprobs is None:
                            await scored.wait()
                        arrived.put_nowait(step)
                        if step.token_ids or step.finish_reason is not None:
                            scored.set()
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        pumps = [asyncio.create_task(pump(*each)) for each in zip(self._choices, self._scored(), strict=True)]
        try:
            running = len(pumps)
            while running:
                match await arrived.get():
                    case None:
                        running -= 1
                    case BaseException() as error:
                        raise error
                    case step:
                        yield step
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _scored(self) -> Iterable[asyncio.Event]:
        """Of each choice, whether the prompt of its job is scored. The first choice of a job does that; a later one may find the
        prompt in the cache and be ahead of it."""
        for job in self._jobs:
            scored = asyncio.Event()
            if job.params.prompt_logprobs is None:
                scored.set()
            yield from [scored] * job.params.n


class _Choice:
    """One sample of a job: its request to the engine, its reader, and what it has used."""

    def __init__(self, engine: Engine, metrics: Metrics, index: int, request: GenerationRequest, job: Job) -> None:
        self.request, self.reader, self._stop = request, job.reader(), job.params.stop
        self.num_tokens = self.cached_tokens = 0
        self._queued_s: float | None = None
        is_scored = request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(request.prompt) if is_scored else []
        self._engine, self._metrics, self._index = engine, metrics, index
        self._started = time.monotonic()
        self._first = self._last = self._started
        self._first_tokens = self._steps = self._rounds = self._drafted = self._accepted = 0

    @property
    def timings(self) -> Timings:
        return Timings(
            first_token_s=self._first - self._started,
            decode_s=self._last - self._first,
            tokens=self.num_tokens,
            first_tokens=self._first_tokens,
            steps=self._steps,
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    async def run(self) -> AsyncGenerator[ChoiceStep]:
        """The steps until it ends; closing it aborts the request."""
        progress = cast(AsyncGenerator[Progress], self._engine.generate(self.request))
        with self._metrics.request_started() as meter:
            try:
                async with aclosing(progress):
                    async for gained in progress:
                        step = self._take(gained, meter)
                        if step.finish_reason is not None:
                            self._end(meter, step.finish_reason)
                        yield step
                        if step.finish_reason is not None:
                            return
            except RequestRefused as refused:
                meter.refused(refused.kind)
                raise

    def _take(self, gained: Progress, meter: RequestMeter) -> ChoiceStep:
        if gained.prompt_logprobs is not None:
            self._take_prompt(gained)
        phase, stop = self.reader.phase, None
        reason: Ending | None = gained.finish_reason
        piece = self.reader.push(gained.tokens)
        events = piece.events
        if piece.stop is not None:
            reason, stop = "stop", piece.stop if piece.stop in self._stop else None
        elif gained.finish_reason is not None:
            rest = self.reader.finish(gained.finish_reason)
            events += rest.events
            if rest.stop is not None:
                reason, stop = "stop", rest.stop if rest.stop in self._stop else None
        if reason == "stop" and self.reader.has_tool_calls:
            reason = "tool_calls"
        self._count(gained, piece.num_tokens)
        if gained.tokens:
            meter.prefilled(len(self.request.prompt), gained.cached_tokens)
        meter.step(phase, piece.num_tokens, gained.accepted, gained.drafted)
        return ChoiceStep(
            index=self._index,
            events=events,
            token_ids=gained.tokens[: piece.num_tokens],
            logprobs=None if gained.logprobs is None else gained.logprobs[: piece.num_tokens],
            finish_reason=reason,
            stop=stop,
        )

    def _count(self, gained: Progress, num_tokens: int) -> None:
        self.cached_tokens, self._queued_s = gained.cached_tokens, gained.queued_seconds
        self.num_tokens += num_tokens
        self._rounds += gained.drafted > 0
        self._drafted += gained.drafted
        self._accepted += gained.accepted
        if gained.tokens:
            self._last = time.monotonic()
            if not self._steps:
                self._first, self._first_tokens = self._last, num_tokens
            self._steps += 1

    def _take_prompt(self, gained: Progress) -> None:
        """By position: a prompt that runs again after a preemption brings the same values again."""
        assert gained.prompt_logprobs is not None
        start, some = gained.prompt_logprobs.start, gained.prompt_logprobs.logprobs
        self.prompt_logprobs[start : start + len(some)] = some

    def _end(self, meter: RequestMeter, reason: Ending) -> None:
        meter.finished(
            reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reader.reasoning_tokens,
            queued_s=self._queued_s,
        )


def new_id(kind: str) -> str:
    """An id for a reply, such as `chatcmpl-...`: not to be guessed."""
    return f"{kind}-{secrets.token_hex(12)}"


def _request(job: Job, id: str, params: SamplingParams, ends: Sequence[int]) -> GenerationRequest:
    """The engine's request for one choice."""
    return GenerationRequest(
        prompt=job.prompt,
        params=params,
        stop_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))),
        priority=job.priority,
        timeout_s=job.timeout_s,
        cache_salt=job.cache_salt,
        id=id,
    )
