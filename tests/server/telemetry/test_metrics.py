"""The counters: what each step of a request counts, per token and not per chunk, and that every dialect says the same."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from legato.engine.messages import Counters, Report
from legato.server.telemetry.metrics import ENDINGS, PHASES, REFUSALS, Metrics
from legato.server.telemetry.tally import Histogram, Window
from legato.types import Stats

VLLM_DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds_bucket", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum",
    "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:request_inference_time_seconds_sum",
}  # fmt: skip
"""What vLLM's Grafana dashboards query, with the two families added in 0.33."""

SGLANG_DASHBOARD = {
    "sglang:e2e_request_latency_seconds_bucket", "sglang:time_to_first_token_seconds_bucket", "sglang:num_running_reqs",
    "sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:num_queue_reqs", "sglang:token_usage",
    "sglang:inter_token_latency_seconds_bucket", "sglang:queue_time_seconds_bucket", "sglang:spec_accept_length",
    "sglang:spec_accept_rate", "sglang:prompt_tokens_total", "sglang:generation_tokens_total",
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics("glm", {"vllm", "sglang"}, num_drafts=5, cache_tokens=6400, clock=clock)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels; `model_name` and `engine` are the same on all and left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {name: text for name, text in sample.labels.items() if name not in ("model_name", "engine")}
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def report(**given: float) -> Report:
    counters = Counters(preemptions=3, iterations=50, checked=4, diverged=1, collapsed=2)
    return Report(Stats(), counters, **given)


def test_a_request_from_arrival_to_end(metrics: Metrics, clock: Clock) -> None:
    with metrics.request_started() as meter:
        clock.now += 0.5
        meter.step("reasoning", 1)
        clock.now += 0.04
        meter.step("reasoning", 4, accepted=3, drafted=5)
        clock.now += 0.02
        meter.step("content", 1, accepted=0, drafted=5)
        meter.finished("stop", prompt_tokens=100, cached_tokens=64, reasoning_tokens=5, queued_s=0.125)

    assert value(metrics, "legato_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "legato_inter_token_seconds_count") == 5
    assert value(metrics, "legato_inter_token_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "legato_inter_token_seconds_bucket", le="0.015") == 4, "four tokens shared 40 ms"
    assert value(metrics, "legato_time_per_output_token_seconds_sum") == pytest.approx(0.06 / 5)
    assert value(metrics, "legato_queue_seconds_sum") == pytest.approx(0.125)
    assert value(metrics, "legato_prefill_seconds_sum") == pytest.approx(0.375)
    assert value(metrics, "legato_decode_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "legato_e2e_seconds_sum") == pytest.approx(0.56)
    assert value(metrics, "legato_requests_total", finish_reason="stop") == 1
    assert value(metrics, "legato_prompt_tokens_total") == 100
    assert value(metrics, "legato_prompt_tokens_cached_total") == 64
    assert value(metrics, "legato_reasoning_tokens_total") == 5
    assert value(metrics, "legato_generation_tokens_total", phase="reasoning") == 5
    assert value(metrics, "legato_generation_tokens_total", phase="content") == 1
    assert value(metrics, "legato_draft_rounds_total", phase="reasoning") == 1
    assert value(metrics, "legato_accepted_tokens_total", phase="reasoning") == 3
    assert [value(metrics, "legato_accepted_tokens_at_total", position=str(p)) for p in range(5)] == [1, 1, 1, 0, 0]
    assert [value(metrics, "legato_drafted_tokens_at_total", position=str(p)) for p in range(5)] == [2] * 5
    assert value(metrics, "legato_accept_length") == pytest.approx(2.5)
    assert metrics.running_meters == 0


def test_every_dialect_counts_the_same(metrics: Metrics, clock: Clock) -> None:
    metrics.watch(lambda: report(running=2, waiting=1, used_pages=30, cached_pages=50, free_pages=20, total_pages=100))
    with metrics.request_started() as meter:
        clock.now += 1
        meter.step("content", 1)
        meter.step("content", 3, accepted=2, drafted=5)
        meter.finished("tool_calls", prompt_tokens=10, cached_tokens=4)
    clock.now += 1

    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 1
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 5
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 2
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:prefix_cache_hits_total") == 4
    assert value(metrics, "vllm:generation_tokens_total") == value(metrics, "sglang:generation_tokens_total") == 4
    assert value(metrics, "vllm:num_requests_running") == value(metrics, "legato_requests_running") == 2
    assert value(metrics, "sglang:num_queue_reqs") == value(metrics, "vllm:num_requests_waiting") == 1
    assert value(metrics, "sglang:token_usage") == value(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.3)
    assert value(metrics, "sglang:num_used_tokens") == 1920
    assert value(metrics, "sglang:spec_accept_length") == pytest.approx(3)
    assert value(metrics, "sglang:spec_accept_rate") == pytest.approx(0.4)
    assert value(metrics, "sglang:gen_throughput") > 0
    assert value(metrics, "vllm:num_preemptions_total") == value(metrics, "legato_preemptions_total") == 3
    assert value(metrics, "legato_selfcheck_divergences_total") == 1
    assert value(metrics, "legato_accept_length_collapsed_total") == 2


def test_what_dashboards_query_is_there(metrics: Metrics) -> None:
    names = {name for name, _ in samples(metrics)}
    assert names >= VLLM_DASHBOARD | SGLANG_DASHBOARD
    assert not any(name.endswith("_created") for name in names), "benchmarks would add its time to the counter"


def test_vllm_bench_reads_acceptance(metrics: Metrics) -> None:
    """The way `vllm bench serve` reads it: text lines that start with the prefix, the value last."""
    meter = metrics.request_started()
    for accepted in (5, 3, 0):
        meter.step("content", accepted + 1, accepted=accepted, drafted=5)
    sums, positions = (
        {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens_per_pos": 0, "num_accepted_tokens": 0},
        {},
    )
    for line in metrics.render().decode().splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        words = line.split()
        kind = next(kind for kind in sums if kind in words[0])
        sums[kind] += int(float(words[-1]))
        if kind == "num_accepted_tokens_per_pos":
            positions[int(words[0].split('position="')[1].split('"')[0])] = int(float(words[-1]))
    assert sums == {
        "num_drafts": 3, "num_draft_tokens": 15, "num_accepted_tokens_per_pos": 8, "num_accepted_tokens": 8,
    }  # fmt: skip
    assert positions == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1}


def test_only_asked_for_dialects_appear() -> None:
    assert b"vllm:" not in Metrics("glm").render()
    text = Metrics("glm", {"vllm"}).render()
    assert b"vllm:" in text and b"sglang:" not in text
    with pytest.raises(ValueError, match="tgi"):
        Metrics("glm", {"tgi"})


@pytest.mark.parametrize(
    "raised, reason",
    [(asyncio.CancelledError, "abort"), (GeneratorExit, "abort"), (RuntimeError, "error"), (None, "abort")],
)
def test_leaving_without_an_end_is_counted(metrics: Metrics, raised: type[BaseException] | None, reason: str) -> None:
    meter = metrics.request_started()
    with contextlib.suppress(*[raised] if raised else []), meter:
        meter.step("content", 1)
        if raised:
            raise raised
    assert metrics.endings == {**dict.fromkeys(ENDINGS, 0), reason: 1}
    meter.finished("stop")
    assert metrics.endings["stop"] == 0 and metrics.running_meters == 0


@settings(max_examples=5, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*PHASES, "unheard_of"]), st.integers(0, 8), st.integers(0, 7), st.integers(0, 7)),
        max_size=6,
    ),
    st.sampled_from([*ENDINGS, "unheard_of"]),
    st.sampled_from([*REFUSALS, "unheard_of"]),
)
def test_counters_never_fall_and_labels_stay_bounded(steps: list, reason: str, refusal: str) -> None:
    metrics = Metrics("glm", {"vllm", "sglang"}, num_drafts=5)
    names = set(samples(metrics)) | {("legato_accept_length", frozenset())}
    before = samples(metrics)
    meter = metrics.request_started()
    for phase, tokens, accepted, drafted in steps:
        meter.step(phase, tokens, min(accepted, drafted), drafted)
        after = samples(metrics)
        assert sum(tally.tokens for tally in metrics.phases.values()) == metrics.generation_tokens
        assert set(after) <= names
        fallen = [key for key in before if not is_gauge(key[0]) and after[key] < before[key]]
        assert not fallen
        before = after
    meter.finished(reason)
    metrics.refused(refusal)
    assert set(samples(metrics)) <= names
    assert sum(metrics.endings.values()) == 1 and sum(metrics.refusals.values()) == 1
    assert metrics.accepted <= metrics.drafted


def is_gauge(name: str) -> bool:
    return not name.endswith(("_total", "_count", "_bucket", "_sum"))


def test_a_refused_request_has_no_ending(metrics: Metrics) -> None:
    with metrics.request_started() as meter:
        meter.refused("never_fits")
    assert value(metrics, "legato_requests_refused_total", kind="never_fits") == 1
    assert sum(metrics.endings.values()) == 0 and metrics.running_meters == 0
    assert value(metrics, "legato_e2e_seconds_count") == 0


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(observed)
    histogram.observe(0.5, 3)
    assert histogram.cumulative() == [("1.0", 4.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.count == 7 and histogram.total == pytest.approx(8.5)


def test_window_forgets_and_fills_gaps() -> None:
    window = Window(5)
    window.at(10.2).tokens += 4
    window.at(10.9).tokens += 4
    assert window.recent(11.0, 5).tokens_per_second == 8, "the running second does not count, the past one does"
    assert window.recent(14.0, 5).tokens_per_second == 2
    assert [slot.tokens for slot in window.past(15.5)] == [8, 0, 0, 0, 0]
    assert window.recent(1000.0, 5).tokens_per_second == 0


def test_snapshot_is_json_of_numbers(metrics: Metrics, clock: Clock) -> None:
    metrics.watch(lambda: report(running=1, total_pages=10, used_pages=5, median_iteration_seconds=0.018))
    with metrics.request_started() as meter:
        clock.now += 1
        meter.prefilled(9, 0)
        meter.step("content", 1)
        clock.now += 1
        meter.step("tool_call", 6, accepted=5, drafted=5)
        meter.finished("stop", prompt_tokens=9)
    clock.now += 1
    seen = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    assert seen["accept_length"]["by_phase"] == {"reasoning": None, "content": None, "tool_call": 6.0}
    assert seen["accept_length"]["by_position"] == [1.0] * 5
    assert seen["engine"]["cache_usage"] == 0.5 and seen["engine"]["iteration_s"] == 0.018
    assert seen["recent_requests"][0] == pytest.approx(
        {"ended_at_s": 2, "reason": "stop", "prompt_tokens": 9, "cached_tokens": 0, "tokens": 7, "ttft_s": 1,
         "tokens_per_second": 6, "accept_length": 6, "e2e_s": 2}
    )  # fmt: skip
    assert sum(second["tokens"] for second in seen["history"]) == 7
    assert seen["totals"]["prompt_tokens"] == 9
