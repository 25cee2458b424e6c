"""Replays without drafts and the watch on accept lengths: silent when all is well, loud when it is not."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest

from legato.bench.overhead import InstantRunner
from legato.config import Config, ConfigError
from legato.engine.loop import Engine
from legato.engine.selfcheck import JUDGED_TOKENS, AcceptMonitor, SelfCheck, first_divergence
from legato.llm import LLM
from legato.schedule import Limits, Progress, Request, Scheduler
from legato.types import Divergence, SamplingParams, TokenLogprob
from tests.engine.conftest import Shipped, requests, run

PARAMS = SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True, presence_penalty=0.5, min_tokens=3)


@pytest.mark.full
def test_requests_are_replayed_and_agree(shipped: Shipped, prompts: list[tuple[int, ...]]) -> None:
    batch = requests(prompts[:4], PARAMS)
    expected = run(shipped.engine(num_drafts=5), batch)
    for overlap in (False, True):
        engine = shipped.engine(num_drafts=5, verify_speculation=0.5, overlap=overlap)
        assert run(engine, batch) == expected, "replays do not show"
        stats = engine.stats
        assert (stats.checked, stats.diverged, stats.first_divergence) == (2, 0, None)
        assert sum(stats.accepted_at) < 4 * 8, "replays do not count as decoding"
        engine.reset_stats()
        assert engine.stats.checked == 0


def test_a_changed_token_is_reported(
    shipped: Shipped, prompts: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """The device is made to go on from a token that was never emitted, as a race between iterations would."""
    engine = shipped.engine(num_drafts=5, verify_speculation=1.0)
    batch = requests(prompts[:2], replace(PARAMS, temperature=0.0))
    rows = engine.runner.rows

    def corrupt() -> None:
        rows.tokens[1, 0] = 4242  # the newest token of the first request, which the target is fed with

    turns = iter(range(100))
    with caplog.at_level(logging.WARNING):
        run(engine, batch, lambda: corrupt() if next(turns) == 2 else None)
    stats = engine.stats
    assert (stats.checked, stats.diverged) == (2, 1)
    assert stats.first_divergence is not None and stats.first_divergence.request_id == "r0"
    assert stats.first_divergence.margin is not None and stats.first_divergence.margin >= 0
    assert "speculation changed a token" in caplog.text


def test_a_text_that_its_caller_stopped_is_checked_too() -> None:
    llm = LLM(config=Config(verify_speculation=1.0), num_drafts=4)
    llm.generate("def f(x):\n", SamplingParams(max_tokens=30, seed=2, stop=("e", "\n")))
    assert (llm.stats.checked, llm.stats.diverged) == (1, 0)


def test_shares() -> None:
    def replayed(share: float) -> list[int]:
        check, found = SelfCheck(share), []
        for number in range(8):
            request = Request(f"r{number}", (1,), SamplingParams(), (), 0)
            check.watch(request)
            outward, replays = check.take([Progress(request.id, (5,), "stop")])
            assert len(outward) == 1
            found += [number] * len(replays)
            for replay in replays:
                assert replay.num_drafts == 0 and replay.params.max_tokens == 1
                assert check.take([Progress(replay.id, (5,), "length")]) == ([], [])
        assert check.checked == len(found) and not check.diverged
        return found

    assert replayed(0.0) == [] and replayed(1.0) == list(range(8))
    assert replayed(0.5) == [1, 3, 5, 7] and replayed(0.25) == [3, 7]
    with pytest.raises(ConfigError, match="verify_speculation"):
        Config(verify_speculation=1.5)


def test_the_first_difference() -> None:
    logprobs = [TokenLogprob(1, -0.1, ((1, -0.1), (2, -2.6)))] * 3
    assert first_divergence("a", [1, 2, 3], [1, 2, 3], []) is None
    assert first_divergence("a", [1, 2, 3], [1, 9, 9], logprobs) == Divergence("a", 1, 2, 9, 2.5)
    assert first_divergence("a", [1, 2, 3], [1, 2], logprobs[:2]) == Divergence("a", 2, 3, None, None)


@pytest.mark.parametrize(
    ("emitted", "accepted", "says"),
    [(1, 0, "accept length 1.00"), (6, 5, "100.0% of the drafts"), (3, 2, None)],
)
def test_collapsed_drafting_is_noticed_once(
    caplog: pytest.LogCaptureFixture, emitted: int, accepted: int, says: str | None
) -> None:
    monitor = AcceptMonitor()
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * JUDGED_TOKENS // emitted):
            monitor.take([Progress("a", (1,) * emitted, None, accepted=accepted, drafted=5)])
    assert monitor.collapsed == (says is not None)
    assert len(caplog.records) == monitor.collapsed and (says or "") in caplog.text


def test_short_and_plain_requests_are_not_judged() -> None:
    monitor = AcceptMonitor()
    for number in range(20):
        monitor.take([Progress(f"r{number}", (1,) * 6, "length", accepted=5, drafted=5)])
        monitor.take([Progress("plain", (1,) * 6, None)])
    assert monitor.collapsed == 0


def test_all_requests_together_are_judged(caplog: pytest.LogCaptureFixture) -> None:
    monitor = AcceptMonitor()
    with caplog.at_level(logging.WARNING):
        for number in range(8 * JUDGED_TOKENS):
            monitor.take([Progress(f"r{number}", (1,), "length", accepted=0, drafted=5)])
    assert "all requests together" in caplog.text and monitor.collapsed == 0


def test_the_engine_counts_collapsed_drafting() -> None:
    """Two requests whose drafts are never accepted, one that is too short to be judged; a reset starts the count anew."""
    limits = Limits(max_running=3, chunk_tokens=64, context=512, num_drafts=3, num_pages=40, page_size=64)
    runner = InstantRunner(limits.num_drafts)
    runner._accepted = itertools.repeat(0)
    engine = Engine(Scheduler(limits), runner, overlap=True)
    run(
        engine,
        [Request(f"r{n}", (1, 2), SamplingParams(max_tokens=most), (), n) for n, most in enumerate((200, 200, 90))],
    )
    assert engine.stats.collapsed == 2 and engine.stats.accept_length == 1
    engine.reset_stats()
    assert engine.stats.collapsed == 0
