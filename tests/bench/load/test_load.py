"""A load on a server whose timings are known: every figure is exact, nobody's waiting time left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import pytest

from legato.bench.load.arrivals import ClosedLoop, OpenLoop
from legato.bench.load.endpoint import Chunk, Endpoint, Reply
from legato.bench.load.facts import Snapshot, accept_length
from legato.bench.load.prompts import Source
from legato.bench.load.run import Load, Result, run, run_async
from legato.bench.load.statistics import Distribution, Limits, Summary
from legato.cli.load import records_of, remarks
from legato.config import ConfigError
from tests.bench.load import still
from tests.bench.load.fake_server import FakeServer, Script

SOURCE = Source("synthetic", input_tokens=10)


def load(sessions: int = 4, arrivals: OpenLoop | ClosedLoop | None = None, **changes: object) -> Load:
    return replace(Load(SOURCE, sessions, arrivals or ClosedLoop(2), warmup=0), **changes)


def endpoint(server: FakeServer, **changes: object) -> Endpoint:
    return replace(Endpoint(server.url, "", max_tokens=16), **changes)


def measured(script: Script, load: Load, **changes: object) -> tuple[Result, FakeServer]:
    """What the client says of a server that shares its clock, which only waiting moves."""

    async def both() -> tuple[Result, FakeServer]:
        async with FakeServer(script) as server:
            return await run_async(endpoint(server, **changes), load), server

    return still.run(both())


def reply(scheduled: float, *chunks: tuple[float, int | None], tokens: int | None, sent: float | None = None) -> Reply:
    made = Reply(scheduled, sent=scheduled if sent is None else sent, ended=chunks[-1][0], completion_tokens=tokens)
    made.chunks = [Chunk(at, count) for at, count in chunks]
    return made


def test_every_figure_against_arithmetic() -> None:
    replies = [
        reply(10.0, (10.5, 3), (11.0, 2), (11.5, 2), tokens=7),
        reply(11.0, (11.2, 1), (12.2, 5), tokens=6, sent=11.1),
    ]
    found = Summary.of(replies, Limits(ttft_s=0.3))
    assert found.duration_s == pytest.approx(2.2)
    assert (found.ttft.mean, found.ttft.p50, found.ttft.largest) == pytest.approx((0.35, 0.35, 0.5))
    # Of the first reply 3 tokens came with the first chunk: 4 tokens took 1 second; of the second 5 took 1 second.
    assert found.tpot.mean == pytest.approx((0.25 + 0.2) / 2)
    assert found.chunk_gap.count == 3 and found.chunk_gap.mean == pytest.approx(2 / 3)
    assert found.e2e.largest == pytest.approx(1.5) and found.lag.largest == pytest.approx(0.1)
    assert found.completion_tokens == 13 and found.tokens_per_s == pytest.approx(13 / 2.2)
    assert found.user_tokens_per_s == pytest.approx(1 / 0.225)
    assert found.tokens_per_chunk == pytest.approx(13 / 5)
    assert found.goodput_per_s == pytest.approx(1 / 2.2)


def test_quantiles_interpolate() -> None:
    found = Distribution.of(range(101))
    assert (found.p50, found.p90, found.p99, found.largest) == (50, 90, 99, 100)
    assert Distribution.of([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert math.isnan(Distribution.of([]).mean)


def test_one_chunk_has_no_time_per_token_and_unknown_counts_give_none() -> None:
    alone = Summary.of([reply(0.0, (1.0, 4), tokens=4)])
    assert alone.tpot.count == 0 and math.isnan(alone.user_tokens_per_s)
    unknown = Summary.of([reply(0.0, (1.0, None), (2.0, None), tokens=None)])
    assert unknown.completion_tokens is None and unknown.tokens_per_s is None and math.isnan(unknown.tokens_per_chunk)


def test_a_known_server_is_measured_exactly() -> None:
    script = Script(first_s=0.6, gap_s=0.1, chunk_tokens=(2, 3, 1, 4, 2, 4))
    result, server = measured(script, load(4, ClosedLoop(2)))
    summary, seen = result.summary, server.seen
    assert not summary.failed and summary.requests == 4 and summary.tokens_per_chunk == pytest.approx(16 / 6)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens) == (28, 12, 64)
    gaps = [later - earlier for one in seen for earlier, later in pairwise(one.left)]
    duration = max(one.left[-1] for one in seen) - min(one.came for one in seen)
    assert [one.left[0] - one.came for one in seen] == pytest.approx([0.6] * 4) and duration == pytest.approx(2.2)
    for name, (found, true) in {
        "ttft": (summary.ttft.p50, median(one.left[0] - one.came for one in seen)),
        "tpot": (summary.tpot.p50, median((one.left[-1] - one.left[0]) / 14 for one in seen)),
        "gap": (summary.chunk_gap.mean, fmean(gaps)),
        "e2e": (summary.e2e.p50, median(one.left[-1] - one.came for one in seen)),
        "duration": (summary.duration_s, duration),
        "tokens/s": (summary.tokens_per_s or 0.0, 64 / duration),
        "user": (summary.user_tokens_per_s, 14 / median(one.left[-1] - one.left[0] for one in seen)),
    }.items():
        assert found == pytest.approx(true), name


def test_chunks_are_stamped_when_they_come() -> None:
    result, server = measured(Script(first_s=0.05, gap_s=0.02), load(3, ClosedLoop(1)))
    for got, seen in zip(result.replies, server.seen, strict=True):
        assert [chunk.at for chunk in got.chunks] == pytest.approx(seen.left)


def test_an_open_loop_charges_the_server_for_everyone_who_waits() -> None:
    """One request at a time, 0.2 s each, and ten arrivals a second: the n-th waits n * 0.1 s longer than it should."""
    script = Script(first_s=0.15, gap_s=0.05, chunk_tokens=(1, 1), one_at_a_time=True)
    result, _ = measured(script, load(8, OpenLoop(10, "fixed")))
    waited = [one.ended - one.scheduled for one in result.replies]
    assert waited == pytest.approx([0.2 + 0.1 * number for number in range(8)])
    assert [one.scheduled - result.replies[0].scheduled for one in result.replies] == pytest.approx(
        [0.1 * number for number in range(8)]
    )


def test_poisson_arrivals_have_the_asked_rate_and_repeat() -> None:
    times = OpenLoop(50).times(4000, seed=1)
    assert times == OpenLoop(50).times(4000, seed=1) != OpenLoop(50).times(4000, seed=2)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.06) and spread == pytest.approx(mean, rel=0.06)


def test_a_server_of_the_standard_fields_only_is_measured_too() -> None:
    script = Script(first_s=0.05, gap_s=0.02, refuse_options=True, continuous=False)
    with FakeServer(script) as server:
        result = run(endpoint(server), load())
    assert result.endpoint.usage == "none" and not result.summary.failed and result.accept is None
    assert result.summary.completion_tokens is None and result.summary.ttft.count == 4
    assert any("counts no tokens" in line for line in remarks(result))
    assert all("stream_options" not in seen.body for seen in server.seen)


def test_final_usage_gives_a_time_per_token_without_counts_per_chunk() -> None:
    result, _ = measured(Script(first_s=0.05, gap_s=0.05, continuous=False), load(), usage="final")
    assert result.summary.completion_tokens == 16 and result.summary.tpot.p50 == pytest.approx(0.05)


def test_the_completions_api_and_extra_fields() -> None:
    with FakeServer(Script(first_s=0.02, gap_s=0.01)) as server:
        result = run(endpoint(server, api="completions", temperature=0.5, extra={"ignore_eos": True}), load(2))
    assert not result.summary.failed
    body = server.seen[0].body
    assert isinstance(body["prompt"], str) and "messages" not in body
    assert (body["temperature"], body["ignore_eos"], body["model"]) == (0.5, True, "fake")


def test_sessions_carry_the_replies_that_came_before() -> None:
    with FakeServer(Script(first_s=0.01, gap_s=0.005)) as server:
        run(endpoint(server), replace(load(2, ClosedLoop(1)), source=Source("agents", 12, turns=3)))
    roles = [[message["role"] for message in seen.body["messages"]] for seen in server.seen[:3]]
    assert roles == [["system"] + ["user", "assistant"] * turn + ["user"] for turn in range(3)]
    assert server.seen[2].body["messages"][2]["content"] == "xxxx"
    shared = {seen.body["messages"][0]["content"] for seen in server.seen}
    assert len(shared) == 1 and len(server.seen) == 6


def test_failures_are_counted_apart_and_end_their_session() -> None:
    with FakeServer(Script(first_s=0.01, gap_s=0.005, fail_every=3)) as server:
        result = run(endpoint(server), load(6, ClosedLoop(1)))
    assert result.summary.failed == 2 and result.summary.ttft.count == 4
    assert any("503: try again" in line for line in remarks(result))


def test_a_cut_stream_is_a_failure() -> None:
    with FakeServer(Script(first_s=0.01, gap_s=0.005, cut_stream=True)) as server:
        result = run(endpoint(server), load(2))
    assert result.summary.failed == 2


def test_accept_length_comes_from_counters_over_the_run_only() -> None:
    before = Snapshot({"vllm:spec_decode_num_drafts_total": 100.0, "vllm:spec_decode_num_accepted_tokens_total": 400.0})
    after = Snapshot({"vllm:spec_decode_num_drafts_total": 110.0, "vllm:spec_decode_num_accepted_tokens_total": 415.0})
    found = accept_length(before, after)
    assert found is not None and found.value == 2.5
    assert accept_length(Snapshot(), Snapshot()) is None
    with FakeServer(Script(first_s=0.01, gap_s=0.005, chunk_tokens=(3, 3), metrics=True)) as server:
        result = run(endpoint(server), load(2))
    assert result.accept is not None and result.accept.value == pytest.approx(3.0)


def test_random_words_are_refused_where_the_server_drafts_unless_asked_for_by_name() -> None:
    noise = replace(load(2), source=Source("random", 10))
    with FakeServer(Script(first_s=0.01, gap_s=0.005, chunk_tokens=(2, 2), metrics=True)) as server:
        with pytest.raises(ConfigError, match="--random-with-speculation"):
            run(endpoint(server), noise)
        result = run(endpoint(server), replace(noise, random_with_speculation=True))
    assert records_of(result)[-1]["random_prompts"] and any("Random words" in line for line in remarks(result))


def test_a_record_is_plain_json_and_holds_every_request() -> None:
    result, _ = measured(Script(first_s=0.01, gap_s=0.005), load(3))
    lines = [json.loads(json.dumps(line, allow_nan=False)) for line in records_of(result)]
    assert [line["request"]["session"] for line in lines[:-1]] == [one.session for one in result.replies]
    assert lines[-1]["summary"]["requests"] == 3 and lines[-1]["correct"] is None


def test_no_server_and_a_refused_request_say_so() -> None:
    with pytest.raises(ConfigError, match="no server answers"):
        run(Endpoint("http://127.0.0.1:9", ""), load())
    with FakeServer(Script()) as server, pytest.raises(ConfigError, match="refused a first request"):
        run(Endpoint(server.url + "/nowhere", "fake", extra={"max_tokens": "x"}), load())


@pytest.mark.parametrize(
    ("text", "limits"),
    [("ttft=500ms", Limits(ttft_s=0.5)), ("e2e=10s, tpot=20ms", Limits(tpot_s=0.02, e2e_s=10.0))],
)
def test_limits_are_read(text: str, limits: Limits) -> None:
    assert Limits.parse(text) == limits


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=1s,ttft=2s", "speed=3ms", "tpot=..ms", "ttft=0ms"])
def test_bad_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        Limits.parse(text)
