"""`legato validate`: a good server passes, every fault that a server can be given is found by its check, and by no chance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from legato.cli.validate import run as print_findings
from legato.config import ConfigError
from legato.validate import acceptance, protocol
from legato.validate.acceptance import KINDS, Measured
from legato.validate.run import Findings, Wanted, all_names, validate
from tests.server.live import Live
from tests.validate.pretender import FAULTS, Pretender

pytestmark = pytest.mark.full


def live(app: Any) -> Live:
    async def nothing() -> None:
        return

    async def start() -> tuple[Any, Callable[[], Awaitable[None]]]:
        return app, nothing

    return Live(start)


def examine(app: Any, *only: str, **given: Any) -> Findings:
    server = live(app)
    try:
        return asyncio.run(validate(Wanted(server.url, only=only, timeout_s=30, **given), lambda outcome: None))
    finally:
        server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that left is waited for less long."""
    monkeypatch.setattr(protocol, "IDLE_S", 1.0)


def test_a_good_server_passes_everything() -> None:
    findings = examine(Pretender())
    assert [outcome.name for outcome in findings.outcomes] != [] and not findings.failed, findings.failed
    assert {outcome.verdict for outcome in findings.outcomes} == {"pass"}
    assert {outcome.name for outcome in findings.outcomes} == set(all_names())
    assert [row.verdict for row in findings.accept] == ["pass"] * len(KINDS)
    assert findings.accept[0].measured == Measured(
        30, pytest.approx(4.8), pytest.approx((0.912, 0.836, 0.76, 0.684, 0.608))
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_by_its_check(fault: str) -> None:
    name = FAULTS[fault]
    asked = (name,) if name not in ("clean text", "empty answers") else (acceptance_name(), name)
    findings = examine(Pretender(fault), *asked)
    assert [outcome.name for outcome in findings.failed] == [name], findings.outcomes
    assert findings.failed[0].detail and findings.failed[0].guards


def acceptance_name() -> str:
    return all_names()[-1]


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert set(all_names()) - set(FAULTS.values()) == {"extraction", "tool use"}


def test_a_small_model_is_not_asked_what_it_cannot_know() -> None:
    findings = examine(
        Pretender("cannot add", "forgets", "bad drafts", model="legato-small"), "arithmetic", acceptance_name()
    )
    assert [outcome.verdict for outcome in findings.outcomes] == ["not applicable"] * 2
    assert [row.verdict for row in findings.accept] == ["not applicable"] * len(KINDS)
    findings = examine(Pretender("cannot add", model="legato-small"), "arithmetic", knows_nothing=False)
    assert [outcome.verdict for outcome in findings.outcomes] == ["fail"]


def test_a_low_accept_length_is_explained_by_its_shape() -> None:
    kind = KINDS[0]
    noise = acceptance.judge(kind, Measured(100, 1.7, (0.3, 0.2, 0.1, 0.05, 0.05)), True)
    recycled = acceptance.judge(kind, Measured(100, 1.9, (0.8, 0.1, 0.0, 0.0, 0.0)), True)
    lower = acceptance.judge(kind, Measured(100, 2.7, (0.6, 0.4, 0.3, 0.2, 0.2)), True)
    assert (noise.verdict, recycled.verdict, lower.verdict) == ("fail", "fail", "fail")
    assert "noise" in noise.hint and "final norm" in recycled.hint and "lower everywhere" in lower.hint
    assert acceptance.judge(kind, Measured(100, 3.6, (0.8, 0.6, 0.5, 0.4, 0.3)), True).verdict == "pass"


def test_vllm_counters_are_understood() -> None:
    def reading(rounds: int, accepted: int) -> dict[str, float]:
        positions = {f"vllm:spec_decode_num_accepted_tokens_per_pos_total@{p}": accepted / 2 for p in range(2)}
        return {
            "vllm:spec_decode_num_drafts_total": rounds, "vllm:spec_decode_num_accepted_tokens_total": accepted,
            **positions,
        }  # fmt: skip

    assert acceptance.difference(reading(5, 6), reading(15, 16)) == Measured(10, 2.0, (0.5, 0.5))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted("http://127.0.0.1:9", timeout_s=5), "nobody answers"),
        (Wanted("localhost:8000"), "http://host:port"),
        (Wanted("http://127.0.0.1:9", only=("spelling",)), "there are health"),
    ],
)
def test_what_cannot_be_asked_is_the_users_fault(wanted: Wanted, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asyncio.run(validate(wanted, lambda outcome: None))


def test_the_terminal_and_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    server = live(Pretender("seed ignored"))
    try:
        wanted = Wanted(server.url, only=("health", "seeds", acceptance_name()), timeout_s=30)
        assert print_findings(wanted, "text") is False
        text = capsys.readouterr().out
        assert print_findings(wanted, "json") is False
        found = json.loads(capsys.readouterr().out)
    finally:
        server.close()
    assert "PASS  health" in text and "FAIL  seeds" in text and "guards against: seeds ignored" in text
    assert "2 passed, 1 failed, 0 not applicable" in text and acceptance.SOURCE in text.replace("\n", " ")
    assert found["passed"] is False and found["model"] == "glm-5.2"
    assert [check["verdict"] for check in found["checks"]] == ["pass", "fail", "pass"]
    assert found["accept_length"]["rows"][0]["measured"] == 4.8
