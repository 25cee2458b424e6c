"""Spans of requests, in memory and over OTLP: their times, their attributes, the caller's trace as their parent."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from legato.cli.serve_port import check_traces
from legato.config import ConfigError
from legato.server.telemetry.metrics import Metrics
from legato.server.telemetry.tracing import Tracing, start

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


class Setup:
    def __init__(self) -> None:
        self.now = 50.0
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider, self.clock)
        self.metrics = Metrics("glm", clock=self.clock)
        self.metrics.observers.append(self.tracing.finished)

    def clock(self) -> float:
        return self.now

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_phases() -> None:
    setup = Setup()
    with setup.metrics.request_started() as meter:
        setup.now += 0.5
        meter.step("content", 1)
        setup.now += 0.25
        meter.step("content", 4, accepted=3, drafted=5)
        meter.finished("stop", prompt_tokens=9, cached_tokens=2, queued_s=0.125)
    spans = setup.spans
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    lengths = {name: round(seconds(span), 6) for name, span in spans.items()}
    assert lengths == {"request": 0.75, "queue": 0.125, "prefill": 0.375, "decode": 0.25}
    assert spans["prefill"].start_time == spans["queue"].end_time
    assert spans["decode"].start_time == spans["prefill"].end_time
    request = spans["request"]
    assert all(span.parent == request.context for name, span in spans.items() if name != "request")
    assert dict(request.attributes or {}) == {
        "gen_ai.request.model": "glm", "gen_ai.response.finish_reasons": "stop", "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5, "legato.cached_tokens": 2, "legato.accept_length": 4.0,
    }  # fmt: skip
    assert request.status.status_code is StatusCode.UNSET


def test_a_request_that_never_ran_has_no_phases_and_a_fault_is_an_error() -> None:
    setup = Setup()
    with pytest.raises(RuntimeError), setup.metrics.request_started():
        raise RuntimeError
    assert set(setup.spans) == {"request"}
    assert setup.spans["request"].status.status_code is StatusCode.ERROR
    setup.exporter.clear()
    with setup.metrics.request_started() as meter:
        meter.refused("queue_full")
    assert not setup.spans, "what the engine did not take has no span"


def test_the_callers_trace_is_continued_into_tasks_and_left_again() -> None:
    setup = Setup()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def work() -> None:
            with setup.metrics.request_started() as meter:
                await asyncio.sleep(0)
                meter.finished("stop")

        await asyncio.create_task(work())

    async def call(*headers: tuple[bytes, bytes]) -> ReadableSpan:
        setup.exporter.clear()
        await setup.tracing.around(application)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
        return setup.spans["request"]

    async def run() -> None:
        inside = await call((b"traceparent", f"00-{TRACE:032x}-{SPAN:016x}-01".encode()))
        assert inside.parent is not None and inside.context is not None
        assert (inside.context.trace_id, inside.parent.span_id) == (TRACE, SPAN)
        assert (await call()).parent is None
        assert (await call((b"traceparent", b"nonsense"))).parent is None

    asyncio.run(run())


def test_spans_are_sent_by_otlp() -> None:
    seen: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracing = start(f"http://127.0.0.1:{server.server_port}/v1/traces")
        metrics = Metrics("glm")
        metrics.observers.append(tracing.finished)
        with metrics.request_started() as meter:
            meter.step("content", 1)
            meter.finished("stop")
        tracing.close()
        server.shutdown()
    assert [path for path, _ in seen] == ["/v1/traces"]
    assert b"decode" in seen[0][1] and b"service.name" in seen[0][1]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="localhost:4317"):
        check_traces("localhost:4317")
    check_traces(None)
    check_traces("http://localhost:4318/v1/traces")
