"""The Prometheus text: which name each counter has in `legato_*`, and in the dashboards of vLLM and SGLang.

Owns names, types, help texts and labels; counts nothing itself, so the names of all dialects always agree. Called by
`server.telemetry.metrics`. Names of vLLM 0.33 and SGLang 0.5.23, read from their releases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from legato.engine.messages import Report
from legato.server.telemetry.tally import Histogram

if TYPE_CHECKING:
    from legato.server.telemetry.metrics import Metrics

Dialect = Literal["vllm", "sglang"]

GAUGE_SECONDS = 10
"""Rates shown as gauges (SGLang's way) are over the last ten seconds."""

Samples = Mapping[tuple[tuple[str, str], ...], float]


class Exposition(Collector):
    """Collects the families of every chosen dialect from the counters of one server."""

    def __init__(self, metrics: Metrics, compat: Collection[Dialect]) -> None:
        self._metrics = metrics
        self._compat = frozenset(compat)
        unknown = self._compat - {"vllm", "sglang"}
        if unknown:
            raise ValueError(f"metrics compat must be among vllm and sglang, got {', '.join(sorted(unknown))}")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family, own names first."""
        yield from self._own()
        if "vllm" in self._compat:
            yield from self._vllm()
        if "sglang" in self._compat:
            yield from self._sglang()

    def _own(self) -> Iterator[Metric]:
        m = self._metrics
        labels = {"model_name": m.model}
        yield counter("legato_requests", "Requests that ended, by how (each choice of a request is one).", {
            (("finish_reason", reason), *labels.items()): float(count) for reason, count in m.endings.items()
        })  # fmt: skip
        yield counter("legato_requests_refused", "Requests refused before the engine, by kind.", {
            (("kind", kind), *labels.items()): float(count) for kind, count in m.refusals.items()
        })  # fmt: skip
        yield counter("legato_prompt_tokens", "Tokens of prompts, cached ones included.", one(labels, m.prompt_tokens))
        yield counter(
            "legato_prompt_tokens_cached", "Tokens of prompts found in the prefix cache.", one(labels, m.cached_tokens)
        )
        yield counter("legato_reasoning_tokens", "Generated tokens inside reasoning.", one(labels, m.reasoning_tokens))
        for name, what, value in (
            ("legato_generation_tokens", "Tokens generated, by phase of the answer.", "tokens"),
            ("legato_draft_rounds", "Iterations of a request that verified drafts, by phase.", "rounds"),
            ("legato_drafted_tokens", "Drafts that were verified, by phase.", "drafted"),
            ("legato_accepted_tokens", "Drafts that were accepted, by phase.", "accepted"),
        ):
            yield counter(name, what, {
                (("phase", phase), *labels.items()): float(getattr(tally, value)) for phase, tally in m.phases.items()
            })  # fmt: skip
        for name, what, counts in (
            ("legato_drafted_tokens_at", "Drafts verified, by position (0 is the first draft).", m.drafted_at),
            ("legato_accepted_tokens_at", "Drafts accepted, by position (0 is the first draft).", m.accepted_at),
        ):
            yield counter(name, what, by_position(counts, labels))
        yield gauge(
            "legato_accept_length", "Tokens per iteration with drafts, since the start.", one(labels, m.accept_length)
        )
        for name, what, histogram in (
            ("legato_time_to_first_token_seconds", "From arrival to the first token.", m.ttft),
            ("legato_inter_token_seconds", "Per token: an iteration's time shared by its tokens.", m.inter_token),
            ("legato_time_per_output_token_seconds", "Per request: decode time over tokens.", m.time_per_output_token),
            ("legato_e2e_seconds", "From arrival to the end.", m.e2e),
            ("legato_queue_seconds", "From arrival in the engine until it first runs.", m.queue_time),
            ("legato_prefill_seconds", "From the first run to the first token.", m.prefill_time),
            ("legato_decode_seconds", "From the first token to the last.", m.decode_time),
            ("legato_request_prompt_tokens", "Tokens of a request's prompt.", m.prompt_length),
            ("legato_request_generation_tokens", "Tokens a request generated.", m.output_length),
            ("legato_request_accept_length", "A request's tokens per iteration.", m.request_accept_length),
        ):
            yield distribution(name, what, histogram, labels)
        yield from self._own_load(labels)

    def _own_load(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        for phase, seconds in self._metrics.startup.items():
            yield gauge(f"legato_startup_{phase}_seconds", f"Start-up time: {phase}.", one(labels, seconds))
        report = self._metrics.report
        if report is None:
            return
        for name, what, value in (
            ("legato_requests_running", "Requests that hold a row of the batch.", report.running),
            ("legato_requests_waiting", "Requests that wait for a row or for pages.", report.waiting),
            ("legato_cache_usage_ratio", "Share of the cache held by running requests, 0 to 1.", cache_usage(report)),
            ("legato_cache_pages", "Pages of the cache.", report.total_pages),
            ("legato_cache_pages_used", "Pages held by running requests alone.", report.used_pages),
            ("legato_cache_pages_prefix", "Pages of the prefix cache.", report.cached_pages),
            ("legato_iteration_seconds", "Median time of the last iterations.", report.median_iteration_seconds),
        ):
            yield gauge(name, what, one(labels, value))
        counters = report.counters
        for name, what, value in (
            ("legato_iterations", "Iterations of the engine.", counters.iterations),
            ("legato_preemptions", "Requests sent back to wait because pages ran out.", counters.preemptions),
            ("legato_evicted_pages", "Pages taken from the prefix cache.", counters.evicted_pages),
            ("legato_selfcheck_requests", "Finished requests replayed without drafts.", counters.checked),
            ("legato_selfcheck_divergences", "Replays that gave other tokens.", counters.diverged),
            ("legato_accept_length_collapsed", "Requests whose accept length collapsed.", counters.collapsed),
        ):
            yield counter(name, what, one(labels, value))

    def _vllm(self) -> Iterator[Metric]:
        m = self._metrics
        labels = {"model_name": m.model, "engine": "0"}
        report = m.report
        for name, what, value in (
            ("vllm:num_requests_running", "Requests in the batch.", report.running if report else 0),
            ("vllm:num_requests_waiting", "Requests waiting.", report.waiting if report else 0),
            ("vllm:kv_cache_usage_perc", "Cache usage, 1 is full.", cache_usage(report) if report else 0),
        ):
            yield gauge(name, what, one(labels, value))
        for name, what, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", m.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", m.cached_tokens),
            ("vllm:prompt_tokens", "Prompt tokens.", m.prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", m.generation_tokens),
            ("vllm:num_preemptions", "Preemptions.", report.counters.preemptions if report else 0),
            ("vllm:spec_decode_num_drafts", "Rounds of drafts.", m.rounds),
            ("vllm:spec_decode_num_draft_tokens", "Drafts.", m.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", m.accepted),
        ):
            yield counter(name, what, one(labels, value))
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            by_position(m.accepted_at, labels),
        )
        ends = {
            "stop": ("stop", "tool_calls"),
            "length": ("length",),
            "abort": ("abort", "deadline"),
            "error": ("error",),
        }
        yield counter("vllm:request_success", "Requests, by how they ended.", {
            (("finished_reason", theirs), *labels.items()): float(sum(m.endings[reason] for reason in ours))
            for theirs, ours in ends.items()
        })  # fmt: skip
        for name, histogram in (
            ("time_to_first_token_seconds", m.ttft),
            ("inter_token_latency_seconds", m.inter_token),
            ("time_per_output_token_seconds", m.inter_token),
            ("request_time_per_output_token_seconds", m.time_per_output_token),
            ("e2e_request_latency_seconds", m.e2e),
            ("request_queue_time_seconds", m.queue_time),
            ("request_prefill_time_seconds", m.prefill_time),
            ("request_decode_time_seconds", m.decode_time),
            ("request_inference_time_seconds", m.inference_time),
            ("request_prompt_tokens", m.prompt_length),
            ("request_generation_tokens", m.output_length),
            ("request_max_num_generation_tokens", m.output_length),
        ):
            yield distribution(f"vllm:{name}", "As legato_*, by vLLM's name.", histogram, labels)

    def _sglang(self) -> Iterator[Metric]:
        m = self._metrics
        labels = {"model_name": m.model}
        report = m.report
        usage = cache_usage(report) if report else 0.0
        recent = m.window.recent(m.clock(), GAUGE_SECONDS)
        for name, what, value in (
            ("sglang:num_running_reqs", "Requests in the batch.", report.running if report else 0),
            ("sglang:num_queue_reqs", "Requests waiting.", report.waiting if report else 0),
            ("sglang:num_used_tokens", "Cache tokens of running requests.", round(usage * m.cache_tokens)),
            ("sglang:max_total_num_tokens", "Tokens the cache can hold.", m.cache_tokens),
            ("sglang:token_usage", "Cache usage, 1 is full.", usage),
            (
                "sglang:cache_hit_rate",
                "Share of prompt tokens found in the prefix cache.",
                m.cached_tokens / m.prompt_tokens if m.prompt_tokens else 0,
            ),
            ("sglang:gen_throughput", "Generated tokens per second, last ten seconds.", recent.tokens_per_second),
            ("sglang:spec_accept_length", "Tokens per round, last ten seconds.", recent.accept_length or 0),
            ("sglang:spec_accept_rate", "Accepted share of drafts, last ten seconds.", recent.accept_rate or 0),
        ):
            yield gauge(name, what, one(labels, value))
        for phase, theirs in (
            ("total", "startup_time_seconds"),
            ("load", "weight_load_duration_seconds"),
            ("capture", "startup_cuda_graph_time_seconds"),
        ):
            if phase in m.startup:
                yield gauge(f"sglang:{theirs}", f"Start-up time: {phase}.", one(labels, m.startup[phase]))
        for name, what, value in (
            ("sglang:prompt_tokens", "Prompt tokens.", m.prompt_tokens),
            ("sglang:generation_tokens", "Generated tokens.", m.generation_tokens),
            ("sglang:cached_tokens", "Prompt tokens found in the prefix cache.", m.cached_tokens),
            ("sglang:num_requests", "Requests that ended.", sum(m.endings.values())),
            ("sglang:num_aborted_requests", "Requests aborted.", m.endings["abort"]),
        ):
            yield counter(name, what, one(labels, value))
        for name, histogram in (
            ("time_to_first_token_seconds", m.ttft),
            ("inter_token_latency_seconds", m.inter_token),
            ("e2e_request_latency_seconds", m.e2e),
            ("queue_time_seconds", m.queue_time),
        ):
            yield distribution(f"sglang:{name}", "As legato_*, by SGLang's name.", histogram, labels)


def cache_usage(report: Report) -> float:
    """Share of the cache that running requests hold, 0..1; the prefix cache, which gives way, does not count."""
    return report.used_pages / report.total_pages if report.total_pages else 0.0


def one(labels: Mapping[str, str], value: float | None) -> Samples:
    """The single sample of a family; none at all when there is no value yet."""
    return {} if value is None else {tuple(labels.items()): float(value)}


def by_position(counts: Collection[int], labels: Mapping[str, str]) -> Samples:
    """A sample per draft position."""
    return {(("position", str(position)), *labels.items()): float(count) for position, count in enumerate(counts)}


def counter(name: str, what: str, samples: Samples) -> Metric:
    """A counter family; Prometheus adds `_total` to its name."""
    return _filled(CounterMetricFamily, name, what, samples)


def gauge(name: str, what: str, samples: Samples) -> Metric:
    """A gauge family."""
    return _filled(GaugeMetricFamily, name, what, samples)


def _filled(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, what: str, samples: Samples
) -> Metric:
    keys = [key for key, _ in next(iter(samples))] if samples else []
    metric = family(name, what, labels=keys)
    for labels, value in samples.items():
        metric.add_metric([text for _, text in labels], value)
    return metric


def distribution(name: str, what: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
    """A histogram family."""
    metric = HistogramMetricFamily(name, what, labels=list(labels))
    metric.add_metric(list(labels.values()), buckets=histogram.cumulative(), sum_value=histogram.total)
    return metric
