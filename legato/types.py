"""Values that cross every border of the house: what a user asks for and what comes back.

Owns the sampling request, finish reasons and log-probabilities, with their validation. Knows nothing of tensors, HTTP or
scheduling; everyone may import it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "deadline"]
"""`stop`: an end or stop token (or a stop string); `length`: `max_tokens` or the context is used up; `abort`: cancelled;
`deadline`: its time was up."""


class ParameterError(ValueError):
    """A field of a request that cannot be honoured. The message names the field, its value and what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def too_long(length: str, context: int) -> str:
    """Why a prompt has no place in a context, which must also hold a new token. `length`: its tokens, `8192` or `more than 9000`.

    Coding agents shorten their conversation and ask again where they read "prompt is too long: 9 tokens > 8 maximum", as
    Anthropic's API says it, or "this model's maximum context length is", as OpenAI's does.
    """
    return (
        f"the prompt is too long: {length} tokens > {context - 1} maximum "
        f"(this model's maximum context length is {context} tokens, at least one of them for the answer)"
    )


MAX_STOP_TOKEN_IDS = 8
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 8
"""Ids that end a request: its own and the checkpoint's."""
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
BAN = -100.0
"""The lowest `logit_bias`: it takes the token away altogether."""

GrammarKind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text must match: a JSON schema (as JSON text), a regular expression, or a grammar in Lark notation.

    `after`: a token id; the grammar holds from the token behind its first appearance. `None`: from the first token.
    """

    kind: GrammarKind
    text: str
    after: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    `temperature` 0 is greedy: the highest logit, ties to the lowest token id. `top_k` 0 and `top_p` 1 mean "off"; `min_p` keeps
    tokens whose probability is at least `min_p` times that of the most likely one. The filters apply in the order top_k, top_p,
    min_p. With the same `seed` a prompt gives the same tokens, whatever is in the batch and however many drafts are used.

    Before temperature and filters the logits are changed in this order: `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, `logit_bias`, then tokens are taken away by `allowed_token_ids`, `bad_token_ids`, `min_tokens` and the
    grammar. Where that would leave no token at all, everything but the grammar is ignored for that token.

    Attributes:
        max_tokens: most tokens to generate; `None` means up to the context length.
        seed: of the sampling noise; `None` draws a fresh one.
        stop: strings that end the text; the text ends before the one that is completed first.
        stop_token_ids: ids that end the text besides the checkpoint's own end tokens (at most 8).
        ignore_eos: go on past the checkpoint's end tokens (for benchmarks).
        logprobs: `None`, or how many alternatives to report beside each chosen token's log-probability (0..20). They are of the
            model's own distribution: temperature 1, before penalties, bias, grammar and filters.
        prompt_logprobs: the same for the tokens of the prompt, all but the first.
        n: how many samples of each prompt (1..128), for `LLM.generate`. The first uses `seed`, the others seeds derived from it.
        min_tokens: end and stop ids are impossible before this many tokens. A stop string still ends the text.
        presence_penalty: taken from the logit of every token generated so far (-2..2).
        frequency_penalty: taken from a token's logit for every time it was generated so far (-2..2).
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the prompt or generated so far
            (above 0, up to 10; 1 is off).
        logit_bias: token id to a value in -100..100 that is added to its logit; -100 takes the token away.
        allowed_token_ids: the only tokens that may be generated, or `None`.
        bad_token_ids: tokens that may not be generated.
        json_schema: JSON text or a mapping; the text is JSON that fits it. Between its parts stands at most one space, or
            one line break with up to 32 characters of indentation.
        regex: the whole text matches it.
        grammar: the whole text is a `start` of this grammar, in llguidance's Lark notation. At most one of these three.
        grammar_after: token id; the grammar holds behind its first appearance only, and until then the answer cannot end and
            holds no other control token. `LLM.chat` sets it when the answer starts with reasoning.
        reasoning_budget: most tokens of reasoning, from the first token generated: where `reasoning_end` has not come by then,
            it is the next token, whatever bias, bans and penalties say. 0 skips reasoning.
        reasoning_end: id of the token that ends reasoning. `LLM.chat` sets it, and drops the budget where the answer does not
            start with reasoning.

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
    prompt_logprobs: int | None = None
    n: int = 1
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    grammar_after: int | None = None
    reasoning_budget: int | None = None
    reasoning_end: int | None = None

    def __post_init__(self) -> None:
        for name, lowest, highest, what in _WHOLE:
            _check_whole(name, getattr(self, name), lowest, highest, what)
        for name, lowest, highest, what in _REAL:
            _check_real(name, getattr(self, name), lowest, highest, what)
        if not self.top_p > 0:
            raise ParameterError("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise ParameterError("repetition_penalty", f"must be above 0 and at most 10, got {self.repetition_penalty}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if isinstance(self.stop, str) or any(not isinstance(text, str) for text in self.stop):
            raise ParameterError("stop", "must be a tuple of strings, not one string")
        if any(not text for text in self.stop):
            raise ParameterError("stop", "an empty string would stop at once")
        self._check_ids()
        self._check_grammar()

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                _check_whole(name, token, 0, None, "ids cannot be negative")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids are supported, got {len(self.stop_token_ids)}"
            )
        for token, bias in self.logit_bias.items():
            _check_real("logit_bias", bias, BAN, -BAN, f"the value for token {token} must be between -100 and 100")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.bad_token_ids):
            raise ParameterError("allowed_token_ids", "leaves no token to generate")

    def _check_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ParameterError(given[1], f"cannot be combined with {given[0]}: give one of them")
        if not given:
            if self.grammar_after is not None:
                raise ParameterError("grammar_after", "needs json_schema, regex or grammar")
            return
        if self.ignore_eos:
            raise ParameterError(
                "ignore_eos", f"cannot be combined with {given[0]}, which decides where the text may end"
            )
        value = getattr(self, given[0])
        if not (isinstance(value, str) or (given[0] == "json_schema" and isinstance(value, Mapping))):
            raise ParameterError(given[0], f"must be text, got {type(value).__name__}")
        try:
            _ = self.constraint
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(given[0], f"is not valid JSON ({error})") from error

    @property
    def constraint(self) -> Grammar | None:
        """The one grammar that is asked for, if any."""
        if self.json_schema is not None:
            schema = json.loads(self.json_schema) if isinstance(self.json_schema, str) else dict(self.json_schema)
            return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False), self.grammar_after)
        if self.regex is not None:
            return Grammar("regex", self.regex, self.grammar_after)
        return None if self.grammar is None else Grammar("grammar", self.grammar, self.grammar_after)


_WHOLE: tuple[tuple[str, int, int | None, str], ...] = (
    ("max_tokens", 1, None, "must be at least 1"),
    ("top_k", 0, 2**31 - 1, "must be 0 (off) or positive"),
    ("seed", 0, 2**63 - 1, "must be between 0 and 2^63 - 1"),
    ("logprobs", 0, MAX_LOGPROBS, f"must be between 0 and {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"must be between 0 and {MAX_LOGPROBS}"),
    ("n", 1, MAX_SAMPLES, f"must be between 1 and {MAX_SAMPLES}"),
    ("min_tokens", 0, None, "cannot be negative"),
    ("grammar_after", 0, None, "ids cannot be negative"),
    ("reasoning_budget", 0, None, "cannot be negative"),
    ("reasoning_end", 0, None, "ids cannot be negative"),
)
"""Whole-number fields: name, lowest, highest, what is allowed. `None` passes where it is a field's default."""

_REAL = (
    ("temperature", 0.0, 100.0, "must be between 0 and 100"),
    ("top_p", 0.0, 1.0, "must be above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "must be between 0 and 1"),
    ("presence_penalty", -2.0, 2.0, "must be between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "must be between -2 and 2"),
    ("repetition_penalty", 0.0, 10.0, "must be above 0 and at most 10"),
)
_OPTIONAL = (
    "max_tokens", "seed", "logprobs", "prompt_logprobs", "grammar_after", "reasoning_budget", "reasoning_end",
)  # fmt: skip


def _check_whole(name: str, value: object, lowest: int, highest: int | None, what: str) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be a whole number, got {value!r}")
    if value < lowest or (highest is not None and value > highest):
        raise ParameterError(name, f"{what}, got {value}")


def _check_real(name: str, value: object, lowest: float, highest: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, f"must be a number, got {value!r}")
    if not lowest <= value <= highest:
        raise ParameterError(name, f"{what}, got {value}")


def samples_of(params: SamplingParams) -> list[SamplingParams]:
    """The `n` single samples that are asked for: the first with the request's own seed, the others with seeds made from it.

    Without a seed each draws a fresh one.
    """
    seeds = [params.seed]
    for index in range(1, params.n):
        digest = hashlib.sha256(f"{params.seed} {index}".encode()).digest()
        seeds.append(None if params.seed is None else int.from_bytes(digest[:8], "little") >> 1)
    return [replace(params, n=1, seed=seed) for seed in seeds]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the model's own distribution at temperature 1) of one emitted token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation: `text` and `token_ids` end at the stop; `logprobs` (if asked for) has one entry per token id.

    `prompt_logprobs` (if asked for) has one entry per token of the prompt: `None` for the first, which nothing precedes.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one turn added to a streamed generation; `finish_reason` is set on the last one only."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a request and its replay without drafts parted: as token `position` of its output the request emitted `emitted`, the
    replay `replayed` (`None`: it had ended). `margin` is the distance between the model's two best logits there (before any
    penalty, bias or grammar): a large one means a fault, one near 0 an accident of rounding."""

    request_id: str
    position: int
    emitted: int
    replayed: int | None
    margin: float | None


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
    drafted_tokens: int = 0
    """Drafts that were verified."""
    checked: int = 0
    """Requests that were replayed without drafts (`Config.verify_speculation`)."""
    diverged: int = 0
    """Of those, how many gave other tokens; `first_divergence` says where the first one did."""
    first_divergence: Divergence | None = None
    collapsed: int = 0
    """Requests whose accept length was below 1.4, or whose drafts were accepted by more than 96 %, after 128 tokens."""
    hit_tokens: int = 0
    """Tokens found in the prefix cache (`prompt_tokens` are those that were run). Never reset, as the rest."""
    cached_pages: int = 0
    evicted_pages: int = 0
    """Pages that have left the device, for host memory where there is room for them, or for good."""
    host_hit_tokens: int = 0
    """Of `hit_tokens`, those that were found in host memory and copied back."""
    host_pages: int = 0
    """Pages in host memory now."""
    host_evicted_pages: int = 0
    """Pages that have left host memory for good."""
    preemptions: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens per decoding iteration of a request; NaN before the first one."""
        rounds = sum(self.accepted_at)
        return sum((a + 1) * n for a, n in enumerate(self.accepted_at)) / rounds if rounds else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decode time, over all requests together; NaN before the first one."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else math.nan
