"""What an answer is told in: pieces as events, what some tokens added as a step, and all of it as a message.

Owns these values and nothing that makes or says them. Made by `server.answer.structure` and `server.answer.plain`; read by
`server.generation`, the APIs and `legato chat`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Phase = Literal["reasoning", "content", "tool_call"]


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """A piece of the answer proper."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """Call number `index` of this answer begins; its name is complete."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. The pieces of a call together are a JSON object, unless the answer was cut inside it."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """Nothing more comes for this call. Every call that starts ends."""

    index: int


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd


class Step(msgspec.Struct, frozen=True):
    """What some tokens added: events in order, no two neighbours mergeable; how many of the tokens belong to the answer (fewer
    than were pushed where the answer ended among them); and what ended it: a stop string, or `</tool_call>` where one call is all
    that may be made."""

    events: tuple[Event, ...]
    num_tokens: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a whole. `is_complete`: `arguments` is a JSON object; false where the answer was cut inside it."""

    id: str
    name: str
    arguments: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """The answer so far, as a whole."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
