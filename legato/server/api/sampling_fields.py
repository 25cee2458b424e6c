"""The fields that OpenAI's routes share: how to sample, when to stop, and what else a request may say.

Owns their names, ranges and defaults, those that are taken and change nothing, and those that are refused. Knows nothing of
prompts or replies. The request models of the routes build on it; what it makes are `SamplingParams`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from legato.server.http.validation import OnlyFalse, OnlyTrue, RequestModel, respelled
from legato.server.settings import RequestLimits, SamplingDefaults
from legato.types import BAN, MAX_SAMPLES, MAX_STOP_TOKEN_IDS, ParameterError, SamplingParams

T = TypeVar("T")

Whole64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
MAX_BANNED = 4096
"""Most ids in a list of allowed or bad ones, or in `logit_bias`."""

StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=BAN, le=-BAN)]],
    Field(max_length=MAX_BANNED),
]

NotSupported = Annotated[None, Field(description="Not supported: leave it out.")]
"""A field of the API that is known and refused: its only value is `null`."""


class StreamOptions(RequestModel):
    """What a stream says besides the answer."""

    include_usage: bool | None = Field(None, description="A last chunk without choices says what was used.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk says what was used so far.")
    include_obfuscation: bool | None = Field(None, description="Taken, and nothing is padded.")


class ResponseText(RequestModel):
    """Free text."""

    type: Literal["text"]


class ResponseJson(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A named JSON schema. It is always enforced, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseSchema(RequestModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ResponseRegex(RequestModel):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: str


class ResponseGrammar(RequestModel):
    """Text that is a `start` of a grammar in Lark notation."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = Annotated[
    ResponseText | ResponseJson | ResponseSchema | ResponseRegex | ResponseGrammar, Field(discriminator="type")
]


class SharedFields(RequestModel):
    """What every request may say about sampling, stopping and serving. What it leaves out is as the checkpoint recommends."""

    model: str | None = Field(None, description="One of /v1/models; left out: the served model.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Whole64 | None = Field(None, description="Same seed, same text.")
    stop: str | list[str] | None = Field(None, description="The text ends before the one that is completed first.")
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = Field(
        None, description="Token id to what is added to its logit; -100 takes it away."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_BANNED)] | None = None
    bad_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BANNED)] | None = None

    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="Higher runs first, and is preempted last."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Prefixes are shared with requests of the same salt only."
    )
    timeout: float | None = Field(None, gt=0, le=1e9, description="Seconds; then it ends.")

    user: str | None = Field(None, description="Taken, and changes nothing.")
    safety_identifier: str | None = Field(None, description="Taken, and changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Taken, and changes nothing: every prefix is looked for.")
    prompt_cache_retention: str | None = Field(None, description="Taken, and changes nothing.")
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = Field(None, description="Nothing is stored.")

    def seed_or_none(self) -> int | None:
        """The seed as the engine takes it: negative ones are whole numbers of 64 bits like others."""
        return None if self.seed is None else self.seed % 2**63

    def stop_strings(self, limits: RequestLimits) -> tuple[str, ...]:
        """The stop strings, checked. Raises `ParameterError`."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return checked_stops("stop", given, limits)

    def sampling(self, defaults: SamplingDefaults, limits: RequestLimits, max_tokens: int | None) -> SamplingParams:
        """All of it as parameters of one answer, without log-probabilities and grammar.

        Raises:
            ParameterError: fields that contradict each other, or are out of range.
        """
        top_k = _or(self.top_k, defaults.top_k)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, defaults.temperature),
            top_k=max(0, top_k),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            seed=self.seed_or_none(),
            stop=self.stop_strings(limits),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=_or(self.min_tokens, 0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias={int(token): value for token, value in (self.logit_bias or {}).items()},
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_token_ids=tuple(self.bad_token_ids or ()),
        )

    def deadline(self, limits: RequestLimits) -> float | None:
        """Seconds that it may take: what it asks for, and never more than the server gives."""
        given = [seconds for seconds in (self.timeout, limits.timeout_s) if seconds is not None]
        return min(given, default=None)


_FORMAT_FIELDS = {"regex": ".regex", "grammar": ".grammar", "json_schema": ".json_schema.schema"}


class SamplingFields(SharedFields):
    """What chat and text completions may say besides."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(None, description="Choices carry `token_ids`, replies `prompt_token_ids`.")
    timings: bool | None = Field(None, description="The reply says where its time went, and its accept length.")
    metadata: dict[str, Any] | None = Field(None, description="Taken, and changes nothing.")
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="Taken; no special token is in a text.")

    best_of: NotSupported = None
    use_beam_search: OnlyFalse | None = None
    logits_processors: NotSupported = None
    truncate_prompt_tokens: NotSupported = None

    def sampling(self, defaults: SamplingDefaults, limits: RequestLimits, max_tokens: int | None) -> SamplingParams:
        """The same, of `n` answers."""
        return replace(super().sampling(defaults, limits, max_tokens), n=_or(self.n, 1))

    def own_names(self) -> AbstractContextManager[None]:
        """Tells faults in the grammar that the engine gets by the field that asked for one."""
        kind = "text" if self.response_format is None else self.response_format.type
        field = "tools" if kind == "text" else "response_format" + _FORMAT_FIELDS.get(kind, "")
        return respelled(((re.compile(r"^(json_schema|regex|grammar)$"), field),))

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def checked_stops(name: str, given: Sequence[str], limits: RequestLimits) -> tuple[str, ...]:
    """Stop strings, each once. Raises `ParameterError` with the field's `name` where there are too many or one is too long."""
    if len(given) > limits.max_stop_strings:
        raise ParameterError(name, f"at most {limits.max_stop_strings} strings are supported, got {len(given)}")
    for number, text in enumerate(given):
        if not 1 <= len(text) <= limits.max_stop_length:
            raise ParameterError(
                f"{name}[{number}]", f"must have 1 to {limits.max_stop_length} characters, got {len(text)}"
            )
    return tuple(dict.fromkeys(given))


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
