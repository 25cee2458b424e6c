"""Runs the checks one after another and collects what they say.

Owns their order and what counts as a failure. Called by `cli.validate`, which prints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from legato.bench.load.wire import Wire, WireError
from legato.config import ConfigError
from legato.validate import acceptance, knowledge, protocol
from legato.validate.acceptance import Row
from legato.validate.check import Check, Failed, NotApplicable, Outcome, Verdict
from legato.validate.target import Target

ACCEPTANCE = "accept length"
SHIPPED_NAME = "legato-small"
"""What `legato serve` calls the checkpoint of the package: a model that knows nothing, to which nothing published applies."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to ask.

    Attributes:
        url: the server.
        model: its name for the model; empty: the first one that it lists.
        key: API key, or empty.
        knows_nothing: leave out what only a large model can do; `None`: as the model's name says.
        only: names of checks; empty: all.
        timeout_s: of one request.
        accept_tokens: tokens per prompt for the accept length.
    """

    url: str
    model: str = ""
    key: str = ""
    knows_nothing: bool | None = None
    only: tuple[str, ...] = ()
    timeout_s: float = 600.0
    accept_tokens: int = 256


@dataclass(slots=True)
class Findings:
    """Everything that was found."""

    url: str
    model: str
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    accept: list[Row] = field(default_factory=list[Row])

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "fail"]

    def as_json(self) -> dict[str, Any]:
        """For `--output json`."""
        return {
            "url": self.url,
            "model": self.model,
            "passed": not self.failed,
            "checks": [
                {
                    "name": outcome.name,
                    "verdict": outcome.verdict,
                    "detail": outcome.detail,
                    "guards_against": outcome.guards,
                    "seconds": round(outcome.seconds, 2),
                }
                for outcome in self.outcomes
            ],
            "accept_length": {"source": acceptance.SOURCE, "rows": [row.as_json() for row in self.accept]},
        }


def all_names() -> list[str]:
    """The names that `Wanted.only` may hold."""
    return [check.name for check in _in_order()] + [ACCEPTANCE]


def _in_order() -> Sequence[Check]:
    return (*protocol.CHECKS, *knowledge.CHECKS, *protocol.AT_THE_END)


async def validate(wanted: Wanted, said: Callable[[Outcome], None]) -> Findings:
    """Asks everything; `said` is called after each check.

    Raises:
        ConfigError: the address is none, nobody answers there, or a name in `only` does not exist.
    """
    unknown = [name for name in wanted.only if name not in all_names()]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: there is no such check; there are {', '.join(all_names())}")
    try:
        wire = Wire(wanted.url, wanted.timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    async with wire:
        target = Target(wire, wanted.url, wanted.model, wanted.key)
        target.model = wanted.model or await _first_model(target)
        is_small = target.model == SHIPPED_NAME if wanted.knows_nothing is None else wanted.knows_nothing
        findings = Findings(wanted.url, target.model)

        def note(outcome: Outcome) -> None:
            findings.outcomes.append(outcome)
            said(outcome)

        for check in (*protocol.CHECKS, *knowledge.CHECKS):
            if not wanted.only or check.name in wanted.only:
                note(await outcome_of(check, target, is_small))
        if not wanted.only or ACCEPTANCE in wanted.only:
            note(await _accept_length(findings, target, is_small, wanted.accept_tokens))
        for check in protocol.AT_THE_END:
            if not wanted.only or check.name in wanted.only:
                note(await outcome_of(check, target, is_small))
    return findings


async def _first_model(target: Target) -> str:
    try:
        status, data = await target.get("/v1/models")
    except (OSError, WireError) as error:
        raise ConfigError(f"nobody answers there ({error})") from error
    if status == 401:
        raise ConfigError("the server asks for a key: give --api-key")
    try:
        return str(json.loads(data)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"/v1/models answers {status} and lists no model: is this an OpenAI-compatible server?"
        ) from error


async def outcome_of(check: Check, target: Target, is_small: bool) -> Outcome:
    """Runs one check. Whatever goes wrong in it is a failure of the server, and says so."""
    started = time.monotonic()
    if check.needs_quality and is_small:
        return Outcome(check.name, "not applicable", "this model is too small to know", check.guards, 0.0)
    verdict: Verdict = "pass"
    try:
        detail = await check.ask(target)
    except NotApplicable as reason:
        verdict, detail = "not applicable", str(reason)
    except Failed as fault:
        verdict, detail = "fail", str(fault)
    except Exception as error:
        verdict, detail = "fail", f"{type(error).__name__}: {error}"
    return Outcome(check.name, verdict, detail, check.guards, time.monotonic() - started)


async def _accept_length(findings: Findings, target: Target, is_small: bool, max_tokens: int) -> Outcome:
    async def ask(target: Target) -> str:
        positions = [name for name in await target.counters() if name.startswith("legato_drafted_tokens_at_total@")]
        same_drafts = not positions or len(positions) == acceptance.NUM_DRAFTS
        findings.accept = await acceptance.table(target, same_drafts and not is_small, max_tokens)
        return acceptance.summary(findings.accept)

    guards = "drafts that are right and useless: the speed is gone, and nothing else shows it"
    return await outcome_of(Check(ACCEPTANCE, guards, ask), target, is_small)
