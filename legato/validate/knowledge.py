"""Checks of the model itself: short questions with one right answer, and a fact far back in a long text.

Owns these questions. A wrong weight layout, a wrong scale or a blind indexer shows here and nowhere else. Not applicable to the
checkpoint that ships with Legato, which is too small to know anything. Called by `validate.run`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from legato.validate.check import Check, NotApplicable, expect
from legato.validate.protocol import GREEDY, WEATHER
from legato.validate.target import Target

QUIET: dict[str, Any] = {**GREEDY, "chat_template_kwargs": {"enable_thinking": False}}
SUMS = ((17, 25), (128, 256), (999, 1), (4096, 512), (73, 81))
COPIED = "Zx9-quartz/41 \u00e9toile; 0x7F, [alpha|beta] ~ 3.1415"
FILLER = "Day {day}: the harbour was quiet, {boats} boats lay at the pier, and the wind came from the {wind}."
WINDS = ("north", "east", "south", "west")
NEEDLE = "The code of the lighthouse door is 7314-kestrel."
DEPTHS = (0.05, 0.5, 0.95)
LONGER_THAN_TOP_K = 400
"""Lines of about 22 tokens: well beyond the 2048 keys that sparse attention picks."""


async def arithmetic(target: Target) -> str:
    """Sums that any model of this size gets right."""
    for a, b in SUMS:
        answer = await target.ask(f"What is {a} + {b}? Reply with the number only.", **QUIET, max_tokens=16)
        found = re.findall(r"\d+", answer.content.replace(",", ""))
        expect(bool(found) and found[-1] == str(a + b), f"{a} + {b} is {answer.content!r}?")
    return f"{len(SUMS)} sums"


async def copying(target: Target) -> str:
    """A string without meaning, said back exactly."""
    answer = await target.ask(f"Repeat exactly, with nothing before or after:\n{COPIED}", **QUIET, max_tokens=80)
    expect(answer.content.strip().strip("`") == COPIED, f"{COPIED!r} came back as {answer.content!r}")
    return "exact"


async def extraction(target: Target) -> str:
    """Fields of a sentence as JSON."""
    answer = await target.ask(
        "Anna is 34 years old and lives in Lyon. Give JSON with the keys name, age (a number) and city, nothing else.",
        **QUIET,
        max_tokens=80,
    )
    text = re.sub(r"^```(?:json)?|```$", "", answer.content.strip(), flags=re.MULTILINE).strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    expect(value == {"name": "Anna", "age": 34, "city": "Lyon"}, f"got {answer.content!r}")
    return text


async def tool_use(target: Target) -> str:
    """The right tool with the right arguments, of its own accord."""
    answer = await target.ask("What will the weather be in Oslo for the next 4 days?", **GREEDY, tools=[WEATHER])
    expect(len(answer.calls) == 1, f"{len(answer.calls)} calls; it said {answer.content[:80]!r}")
    arguments = json.loads(answer.calls[0]["function"]["arguments"])
    expect(arguments == {"city": "Oslo", "days": 4}, f"called with {arguments}")
    return str(arguments)


async def needle(target: Target) -> str:
    """A fact at the beginning, in the middle and at the end of a text several times longer than the sparse selection."""
    _, data = await target.get("/v1/models")
    listed = next((model for model in json.loads(data)["data"] if model["id"] == target.model), {})
    limit = listed.get("max_model_len")
    if isinstance(limit, int) and limit < 16_000:
        raise NotApplicable(f"the context of {limit} is too short")
    length = 0
    for depth in DEPTHS:
        lines = [
            FILLER.format(day=day, boats=day % 17 + 2, wind=WINDS[day % 4]) for day in range(1, LONGER_THAN_TOP_K + 1)
        ]
        lines.insert(round(depth * len(lines)), NEEDLE)
        question = "\n".join(lines) + "\n\nWhat is the code of the lighthouse door? Reply with the code only."
        answer = await target.ask(question, **QUIET, max_tokens=24)
        length = answer.usage.get("prompt_tokens", 0)
        expect("7314-kestrel" in answer.content, f"at depth {depth:.0%} of {length} tokens: {answer.content!r}")
    return f"found at {', '.join(f'{depth:.0%}' for depth in DEPTHS)} of {length} tokens"


CHECKS = (
    Check("arithmetic", "wrong scales or layouts: text that reads well and is wrong", arithmetic, needs_quality=True),
    Check("copying", "rare wrong tokens from broken quantisation", copying, needs_quality=True),
    Check("extraction", "rare wrong tokens in structured text", extraction, needs_quality=True),
    Check("tool use", "a chat template or tool format that the model was not trained on", tool_use, needs_quality=True),
    Check(
        "needle in a long text",
        "an indexer that is blind beyond its top-k, or in old chunks",
        needle,
        needs_quality=True,
    ),
)
