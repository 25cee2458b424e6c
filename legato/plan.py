"""Plan and Outcome: two of the three values that go round (the third, a Flight, belongs to the runtime).

A Plan says who runs, how far and on which pages; an Outcome says what came back. Pure data: the scheduler builds plans and
reads outcomes, the runner does the reverse. No torch, no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.types import Grammar, TokenLogprob


@dataclass(frozen=True, slots=True)
class ReasoningBound:
    """Reasoning ends with the token `end`. From position `last` on nothing else may stand, until it has come."""

    last: int
    end: int


@dataclass(frozen=True, slots=True)
class Controls:
    """What changes a request's logits before they are sampled; only requests that ask for any of it have one.

    Attributes:
        prompt, generated: all tokens of the request that are known at admission (`generated` after a preemption only).
        min_length: end ids are impossible at positions before it.
        bias: token ids and what is added to their logits; -inf takes a token away.
        allowed: the only tokens there are, or `None`.
        grammar: what the generated text must match.
        reasoning: where reasoning has to end, for a request whose reasoning is bounded and has not ended.
    """

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    presence: float
    frequency: float
    repetition: float
    min_length: int
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None
    grammar: Grammar | None
    reasoning: ReasoningBound | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the logits depend on which tokens have come before."""
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes a device row. Written to the row before the plan's first kernel.

    Attributes:
        row: the device row (row 0 is padding and never admitted).
        pages: physical pages in order, the first of them perhaps shared with other requests; page 0 is the dummy page and never
            granted. Together they are the row's capacity until a `PageGrant` extends it.
        max_length: prompt plus generated tokens may not exceed it.
        stop_ids: token ids that end the request.
        seed: of the sampling noise.
        logprobs: alternatives wanted beside each token's log-probability, -1 for none at all.
        prompt_logprobs: the same for the tokens of the prompt.
        num_drafts: drafts that this request verifies; `None`: as many as the engine makes. 0 is plain decoding.
        controls: penalties, bias, bans and grammar, for a request that has any.
    """

    row: int
    pages: tuple[int, ...]
    max_length: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int
    prompt_logprobs: int = -1
    num_drafts: int | None = None
    controls: Controls | None = None


@dataclass(frozen=True, slots=True)
class PageGrant:
    """More pages for a running row: entries `first`, `first + 1`, ... of its page table, which were unused until now.

    Append-only: no iteration in the air can have read those entries, so they are written without waiting for one.
    """

    row: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy a cached page, all layers of it, to a slot of host memory. The page may be granted anew in the same plan."""

    page: int
    slot: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a slot of host memory back to a page. The slot may be filled anew in the same plan."""

    slot: int
    page: int


Move = Offload | Restore


@dataclass(frozen=True, slots=True)
class Extend:
    """Run tokens that the host knows (a prompt or a chunk of one), from position `start`.

    `next_token` is the token after the chunk, which the draft layer needs for the chunk's last row; `None` on the last chunk:
    then the first new token is sampled there.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: rows to admit, pages to add, chunks to extend, and rows that verify the drafts the device holds for them.

    `moves` come before all of it, one after the other: a later one may use the page or the slot of an earlier one.
    `decodes` may name rows that have finished on the device since the host last looked, or that have used up their pages: they
    emit nothing.
    `num_drafts` is K: decoding rows verify up to so many drafts, and so many are made for all that sample.
    `layers`: the target's layers that the chunks go through. What comes behind the last (the draft layer, the choice of a token)
    counts as one layer more. Where they do not begin at 0, the plan before has brought the very same chunks so far; they sample,
    and their cache is whole, only at the end. `None`: all at once.
    `drops`: chunks that the plan before brought a part of the way go no further, and what is held of them may go.
    """

    epoch: int
    admits: tuple[Admit, ...]
    extends: tuple[Extend, ...]
    decodes: tuple[int, ...]
    grants: tuple[PageGrant, ...] = ()
    moves: tuple[Move, ...] = ()
    num_drafts: int = 0
    layers: range | None = None
    drops: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not self.extends and not self.decodes and not self.drops


@dataclass(frozen=True, slots=True)
class Emission:
    """What one row emitted in one iteration.

    `accepted` counts drafts that the target agreed with before any cut at a stop or limit, out of `drafted` that it verified.
    `is_plain`: the request wants no drafts.
    """

    row: int
    tokens: tuple[int, ...]
    done: bool
    accepted: int
    drafted: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from position `start` on, from one chunk of a row's prompt."""

    row: int
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an iteration brought: one emission per row that sampled (decodes and last chunks). `seconds`: by the device's own
    clock, from the end of the one before it that brought any; `None` where it has no clock."""

    epoch: int
    emissions: tuple[Emission, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    seconds: float | None = field(default=None, compare=False)
