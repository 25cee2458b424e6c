"""A request and its life-cycle as types: waiting -> prefilling -> decoding -> finished, and back to waiting when preempted.

Owns what is asked, what is reported, and what the host knows: tokens so far and bounds on what the device may have added.
Called by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato.plan import PromptLogprobs
from legato.schedule.pages import Holding
from legato.types import FinishReason, SamplingParams, TokenLogprob

State = Literal["waiting", "prefilling", "decoding", "finished"]


class RequestError(ValueError):
    """A request that can never run here. The message says why, with the numbers; `name` is the field at fault, if it is one."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NeverFits(RequestError):
    """A request that is longer than the context, or than the whole cache."""


class QueueFull(RequestError):
    """A request that cannot wait here now: as many wait as may. It can be sent again later."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to do: `prompt` token ids, how to sample, and the ids that end it (checkpoint's and user's).

    Attributes:
        num_drafts: how many drafts it verifies per iteration; `None`: as many as the engine makes.
        priority: higher ones are admitted first, and preempted last; first come, first served among equals.
        deadline: it ends then, wherever it is, with the reason "deadline"; on the clock whose time `Scheduler.plan` is given.
        cache_salt: it shares cached prefixes with requests of the same salt only.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    num_drafts: int | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one iteration brought to one request. Every request that was added ends with exactly one `finish_reason`.

    `cached_tokens`: how many tokens of the prompt were found in the prefix cache when it was first admitted, at the time
    `admitted_at` (`None`: it never was).
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    accepted: int = 0
    drafted: int = 0
    cached_tokens: int = 0
    admitted_at: float | None = None


@dataclass(slots=True)
class Sequence:
    """A request on its way.

    Attributes:
        text: the prompt, then what has come back.
        rank: order of importance, the smallest first: (-priority, arrival).
        max_length: prompt plus output never exceed it.
        row, holding: its device row and pages, from admission until it ends or is preempted.
        prefill: how much text is run from known tokens: all there was at the last admission.
        launched: how much of that plans have covered.
        committed: positions whose cache rows are settled: the lower bound on the device's length.
        in_flight: iterations that decode it and have not come back.
        last_epoch: the last iteration that touches its row and pages.
        cached: prompt tokens that its first admission found in the cache.
        admitted_at: when that was, on the clock of the deadlines.
        reported: prompt tokens whose log-probabilities have been passed on.
    """

    request: Request
    rank: tuple[int, int]
    max_length: int
    text: list[int]
    state: State = "waiting"
    row: int = 0
    holding: Holding | None = None
    prefill: int = 0
    launched: int = 0
    committed: int = 0
    in_flight: int = 0
    last_epoch: int = -1
    cached: int | None = None
    admitted_at: float | None = None
    reported: int = 0

    @property
    def output(self) -> list[int]:
        """What has come back."""
        return self.text[len(self.request.prompt) :]

    @property
    def pages(self) -> list[int]:
        """The pages it holds, in order; the same list as its holding's."""
        return [] if self.holding is None else self.holding.pages

    @property
    def least_length(self) -> int:
        """Least length on the device when everything launched has run, once it decodes: the newest token is not in the cache."""
        return max(self.prefill, len(self.text) - 1)

    def most_length(self, num_drafts: int, page_size: int) -> int:
        """Most length on the device when everything launched has run, once it decodes."""
        grown = self.least_length + self.in_flight * (num_drafts + 1)
        return min(grown, self.max_length - 1, len(self.pages) * page_size)
