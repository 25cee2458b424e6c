"""Values that cross every border of the house: what a user asks for and what comes back.

Owns the sampling request, finish reasons and log-probabilities, with their validation. Knows nothing of tensors, HTTP or
scheduling; everyone may import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end or stop token (or a stop string); `length`: `max_tokens` or the context is used up; `abort`: cancelled."""


class ParameterError(ValueError):
    """A field of a request that cannot be honoured. The message names the field, its value and what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    `temperature` 0 is greedy: the highest logit, ties to the lowest token id. `top_k` 0 and `top_p` 1 mean "off"; `min_p` keeps
    tokens whose probability is at least `min_p` times that of the most likely one. The filters apply in the order top_k, top_p,
    min_p. With the same `seed` a prompt gives the same tokens, whatever is in the batch and however many drafts are used.

    Attributes:
        max_tokens: most tokens to generate; `None` means up to the context length.
        seed: of the sampling noise; `None` draws a fresh one.
        stop: strings that end the text; the text ends before the one that is completed first.
        stop_token_ids: ids that end the text besides the checkpoint's own end tokens (at most 8).
        ignore_eos: go on past the checkpoint's end tokens (for benchmarks).
        logprobs: `None`, or how many alternatives to report beside each chosen token's log-probability (0..20).

    Raises:
        ParameterError: a field is out of its range; the message names it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise ParameterError("temperature", f"must be between 0 and 100, got {self.temperature}")
        if self.top_k < 0:
            raise ParameterError("top_k", f"must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ParameterError("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ParameterError("min_p", f"must be between 0 and 1, got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ParameterError("seed", f"must be between 0 and 2^63 - 1, got {self.seed}")
        if isinstance(self.stop, str):
            raise ParameterError("stop", "must be a tuple of strings, not one string")
        if any(not text for text in self.stop):
            raise ParameterError("stop", "an empty string would stop at once")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids are supported, got {len(self.stop_token_ids)}"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ParameterError("stop_token_ids", f"ids cannot be negative, got {min(self.stop_token_ids)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ParameterError("logprobs", f"must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}")


MAX_STOP_TOKEN_IDS = 8
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the model's own distribution at temperature 1) of one emitted token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation: `text` and `token_ids` end at the stop; `logprobs` (if asked for) has one entry per token id."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one turn added to a streamed generation; `finish_reason` is set on the last one only."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of an engine since it started (or since `reset`).

    Accept length and speed are always kept apart: `accept_length` is tokens per decoding iteration of a request (1 without
    drafts). `decoded_tokens` and `decode_seconds` cover the turns that only decode, so speed is never mixed with prefill.
    """

    iterations: int = 0
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0
    accepted_at: tuple[int, ...] = field(default=())
    """`accepted_at[a]`: how often a decoding request accepted exactly `a` drafts."""

    @property
    def accept_length(self) -> float:
        """Mean tokens per decoding iteration of a request; NaN before the first one."""
        rounds = sum(self.accepted_at)
        return sum((a + 1) * n for a, n in enumerate(self.accepted_at)) / rounds if rounds else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decode time, over all requests together; NaN before the first one."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else math.nan
