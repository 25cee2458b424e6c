"""A request and its life-cycle as types: waiting -> prefilling -> decoding -> finished.

Owns what the host knows of a request: its tokens so far and bounds on what the device may have added. Called by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from legato.types import SamplingParams

State = Literal["waiting", "prefilling", "decoding", "finished"]


class RequestError(ValueError):
    """A request that can never run here. The message says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to do: `prompt` token ids, how to sample, and the ids that end it (checkpoint's and user's).

    `num_drafts`: how many drafts it verifies per iteration; `None`: as many as the engine makes.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    num_drafts: int | None = None


@dataclass(slots=True)
class Sequence:
    """A request on its way. `launched` counts prompt tokens that plans have covered; `output` is what has come back.

    `row` and `pages` are held from admission until the request ends; `last_epoch` is the last iteration that touches them.
    """

    request: Request
    max_length: int
    state: State = "waiting"
    row: int = 0
    pages: tuple[int, ...] = ()
    launched: int = 0
    output: list[int] = field(default_factory=list[int])
    last_epoch: int = -1

    @property
    def remaining_prompt(self) -> int:
        return len(self.request.prompt) - self.launched
