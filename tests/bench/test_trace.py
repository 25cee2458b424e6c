"""Reading a profile: what is busy, what lies between, which launch a kernel belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legato.bench import trace_run
from legato.bench.trace import Share, Span, Trace, busy, figures, shares
from legato.bench.trace_page import View, page
from legato.config import Config, ConfigError, ExecutionConfig, ScheduleConfig
from legato.engine.start import start
from legato.model.checkpoint import Checkpoint


def trace() -> Trace:
    """Two iterations of two kernels that overlap by 1 us, 5 us apart; a copy beside the second, and a wait."""
    device = (
        Span("a", 10_000, 20_000, 1),
        Span("b", 19_000, 30_000, 1),
        Span("a", 35_000, 45_000, 2),
        Span("Memcpy DtoH", 36_000, 37_000, 7, is_copy=True),
        Span("b", 44_000, 55_000, 2),
        Span("a", 60_000, 70_000, 3),
    )
    host = (
        Span("cudaGraphLaunch", 0, 1_000, 1),
        Span("cudaGraphLaunch", 1_000, 2_000, 2),
        Span("cudaStreamSynchronize", 2_000, 3_000, 8),
        Span("cudaMalloc", 2_000, 3_000, 9),
        Span("cudaGraphLaunch", 3_000, 4_000, 3),
    )
    return Trace(device, host)


def test_overlapping_kernels_count_once():
    assert busy(trace().iterations()[0]) == 20_000
    assert busy([]) == 0


def test_figures_are_of_launches_and_what_lies_between():
    found = figures(trace())
    assert (found.num_iterations, found.iteration_us, found.busy_us, found.gap_us) == (3, 25.0, 20.0, 5.0)
    assert found.busy_percent == pytest.approx(100 * 40 / 50) and found.kernels == 2


def test_what_makes_the_host_wait_is_named():
    assert trace().waits() == {"cudaStreamSynchronize": 1} and trace().allocations() == {"cudaMalloc": 1}
    assert trace().copies() == {"Memcpy DtoH": 1}


def test_shares_add_up_to_the_busy_time():
    assert shares(trace().iterations()[:2]) == [Share("a", 1.0, 10.0), Share("b", 1.0, 10.0)]


def test_a_trace_without_graphs_is_refused():
    with pytest.raises(ValueError, match="0 iterations of 1 graph launches"):
        figures(Trace((), ()))


def test_the_page_draws_every_span_and_names_every_kernel():
    spans = (Span("a<float>", 0, 50_000, 1), Span("b", 50_000, 60_000, 1))
    recorded = Trace(
        (*spans, Span("c", 70_000, 80_000, 2)), (Span("cudaGraphLaunch", 0, 1, 1), Span("cudaGraphLaunch", 1, 2, 2))
    )
    text = page("one & two", "here", [View("", figures(recorded), spans, shares([spans]))])
    # The long span runs over 10 stripes of 5 us each (of 12), the short one over the other two.
    assert text.count("<rect") == 12
    assert "one &amp; two" in text and "a&lt;float&gt;" in text and "<script" not in text
    assert "83.3" in text, "a's share of the time"


@pytest.mark.full
def test_a_recording_runs_its_requests_and_writes_its_files(tmp_path, monkeypatch):
    """On a CPU, with a trace from elsewhere: all but the profile of a GPU."""

    def started(config: Config, checkpoint: Checkpoint) -> object:
        real = start(config, checkpoint)
        return replace(real, settings=replace(real.settings, graphs=True))

    monkeypatch.setattr(trace_run, "start", started)
    monkeypatch.setattr(trace_run.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Trace, "of", staticmethod(lambda events: trace()))
    config = Config(execution=ExecutionConfig(device="cpu"), schedule=ScheduleConfig(max_running=2))
    wanted = trace_run.Wanted(batch=2, context=70, iterations=3, temperature=0.0)
    found, num_drafts = trace_run.record(config, wanted, tmp_path, "here")
    assert num_drafts == 5 and found.accept_length >= 1 and found.turn_us > 0
    assert found.waits == {"cudaStreamSynchronize": 1} and found.allocations == {"cudaMalloc": 1}
    assert found.fields(wanted, num_drafts)["case"]["batch"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"trace.html", "trace.json.gz"}
    with pytest.raises(ConfigError, match="--context"):
        trace_run.record(config, replace(wanted, context=8100), tmp_path, "here")
