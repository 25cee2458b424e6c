"""What a check is and how one ends.

Owns the three verdicts and how a check says them; knows no check. Called by every list of checks and by `validate.run`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from legato.validate.target import Target

Verdict = Literal["pass", "fail", "not applicable"]


class Failed(Exception):
    """The server does it wrong; the message says what was seen and what is right."""


class NotApplicable(Exception):
    """It cannot be judged here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question to a server.

    Attributes:
        name: as it is shown and chosen by.
        guards: the known kinds of fault that it would find, in plain words.
        ask: returns what was seen; raises `Failed` or `NotApplicable`. Other errors count as failures too.
        needs_quality: it asks whether the model knows something, not whether the server works.
    """

    name: str
    guards: str
    ask: Callable[[Target], Awaitable[str]]
    needs_quality: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended."""

    name: str
    verdict: Verdict
    detail: str
    guards: str
    seconds: float


def expect(is_right: bool, message: str) -> None:
    """Raises `Failed` with the message where something is not right."""
    if not is_right:
        raise Failed(message)
