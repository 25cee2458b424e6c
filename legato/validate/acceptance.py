"""Accept length by kind of prompt, beside what is published for GLM-5.2.

Owns the prompts, the published figures with their source, and what a low figure usually means. Accept length is taken from the
server's counters, apart from any time. Called by `validate.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legato.validate.check import Failed, NotApplicable
from legato.validate.target import Target

SOURCE = "SGLang pull request 29787: GLM-5.2 NVFP4, greedy, 5 drafts"
NUM_DRAFTS = 5
TOLERANCE = 0.8
"""A figure below this share of the published one fails: these prompts are few, and not the published sets themselves."""
NOISE = 1.9
"""Below this drafts are close to noise (1.75 is reported for drafts from the hidden state before the final norm)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one kind and the published accept length of the set they imitate."""

    name: str
    like: str
    published: float
    prompts: tuple[str, ...]


KINDS = (
    Kind("chat", "MT-Bench", 3.66, (
        "Compose a short travel blog post about a trip to Hawaii, with cultural experiences and must-see places.",
        "I have a difficult colleague. Draft a polite email that asks for a meeting to clear the air.",
        "Describe a vivid and unusual character who runs a night market.",
    )),
    Kind("code", "HumanEval", 4.33, (
        "Write a Python function has_close_elements(numbers, threshold) that says whether any two numbers are closer than "
        "the threshold. Give the code only.",
        "Write a Python function that returns the longest palindromic substring of a string. Give the code only.",
        "Write a Python function that parses nested parentheses and returns the deepest level of each group.",
    )),
    Kind("school mathematics", "GSM8K", 4.49, (
        "A baker makes 24 rolls an hour for 5 hours and sells three quarters of them at 2 dollars each. How much does he earn?",
        "Tom reads 12 pages a day. His book has 252 pages and he has read a third of it. In how many days is he done?",
        "A train goes 60 km in 45 minutes. How far does it go in 3 hours at the same speed?",
    )),
    Kind("competition mathematics", "MATH-500", 4.61, (
        "Find the sum of all positive integers n for which n^2 + 85n + 2017 is a perfect square.",
        "How many integers from 1 to 1000 are divisible by neither 2 nor 5?",
        "What is the remainder of 7^2026 divided by 100?",
    )),
)  # fmt: skip

COUNTERS = (
    ("legato_draft_rounds_total", "legato_accepted_tokens_total", "legato_accepted_tokens_at_total"),
    (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
)
"""By server: rounds, accepted drafts, accepted drafts by position."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Accept length over some prompts. `positions`: share of rounds that accepted the draft at each position."""

    rounds: int
    accept_length: float
    positions: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    kind: str
    like: str
    published: float
    measured: Measured | None
    verdict: str
    hint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--output json`."""
        found = self.measured
        return {
            "kind": self.kind,
            "like": self.like,
            "published": self.published,
            "measured": None if found is None else round(found.accept_length, 3),
            "rounds": 0 if found is None else found.rounds,
            "accepted_by_position": [] if found is None else [round(share, 3) for share in found.positions],
            "verdict": self.verdict,
            "hint": self.hint,
        }


async def measure(target: Target, prompts: tuple[str, ...], max_tokens: int) -> Measured:
    """Answers the prompts greedily, one after another, and reads the counters before and after.

    Raises:
        NotApplicable: the server shows no counters of drafts, or drafted nothing.
    """
    before = await target.counters()
    for prompt in prompts:
        await target.ask(prompt, temperature=0, max_tokens=max_tokens)
    return difference(before, await target.counters())


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Measured:
    """Accept length between two readings. Raises `NotApplicable`."""
    for rounds_name, accepted_name, position_name in COUNTERS:
        if rounds_name not in after:
            continue
        rounds = after[rounds_name] - before.get(rounds_name, 0.0)
        if rounds <= 0:
            raise NotApplicable("the server drafts nothing")
        accepted = after[accepted_name] - before.get(accepted_name, 0.0)
        positions: list[float] = []
        while (name := f"{position_name}@{len(positions)}") in after:
            positions.append((after[name] - before.get(name, 0.0)) / rounds)
        return Measured(round(rounds), 1 + accepted / rounds, tuple(positions))
    raise NotApplicable("/metrics shows no counters of drafts")


def judge(kind: Kind, found: Measured, is_comparable: bool) -> Row:
    """A measured figure beside the published one; not comparable: another model or number of drafts."""
    if not is_comparable:
        return Row(kind.name, kind.like, kind.published, found, "not applicable")
    low = found.accept_length < TOLERANCE * kind.published
    return Row(kind.name, kind.like, kind.published, found, "fail" if low else "pass", hint(found) if low else "")


def hint(found: Measured) -> str:
    """What a low accept length usually is, from its shape over the positions."""
    conditional = [now / before if before > 0.05 else 0.0 for before, now in zip(found.positions, found.positions[1:])]
    first = found.positions[0] if found.positions else None
    if first is not None and first > 0.6 and conditional and conditional[0] < 0.5:
        return "the first draft is good and the next is not: hidden state passed on without its final norm, or reused selection"
    if found.accept_length < NOISE:
        return (
            "drafts are close to noise: MTP weights or scales not loaded, or hidden states from before the final norm"
        )
    return "lower everywhere: another quantisation, or the target's own selection reused for the drafts"


async def table(target: Target, is_comparable: bool, max_tokens: int) -> list[Row]:
    """A row per kind. Raises `NotApplicable`."""
    return [judge(kind, await measure(target, kind.prompts, max_tokens), is_comparable) for kind in KINDS]


def summary(rows: list[Row]) -> str:
    """One line for the list of checks. Raises `Failed` where a row fails."""
    said = ", ".join(f"{row.kind} {row.measured.accept_length:.2f}" for row in rows if row.measured is not None)
    failed = [row for row in rows if row.verdict == "fail"]
    if failed:
        raise Failed(f"{said}; {failed[0].kind} should be about {failed[0].published}: {failed[0].hint}")
    if all(row.verdict == "not applicable" for row in rows):
        raise NotApplicable(f"{said}; nothing is published for this model and number of drafts")
    return said
