"""OpenTelemetry spans of requests: the request, and in it queue, prefill and decode, with the times that the metrics have.

Owns their names and attributes, and the link to a caller's `traceparent`. The only module that needs the extra `otel`; it is
imported when traces are asked for, by `cli.serve`. Nothing of what was said is in a span.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.server.telemetry.meter import Timeline

CARRIED = ("traceparent", "tracestate")


class Tracing:
    """Turns finished requests into spans of `provider`.

    Args:
        provider: where spans go.
        clock: the monotonic clock of the timelines, in seconds.
    """

    def __init__(self, provider: TracerProvider, clock: Callable[[], float] = time.monotonic) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("legato")
        self._offset_ns = time.time_ns() - round(clock() * 1e9)

    def finished(self, timeline: Timeline) -> None:
        """Records one request. Its parent is the span that the caller named, if any."""
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": timeline.model,
            "gen_ai.response.finish_reasons": timeline.reason,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.tokens,
            "legato.cached_tokens": timeline.cached_tokens,
        }
        if timeline.accept_length is not None:
            attributes["legato.accept_length"] = timeline.accept_length
        request = self._tracer.start_span("request", start_time=self._ns(timeline.started), attributes=attributes)
        if timeline.reason == "error":
            request.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(request)
        for name, start, end in timeline.parts():
            self._tracer.start_span(name, context=inside, start_time=self._ns(start)).end(self._ns(end))
        request.end(self._ns(timeline.ended))

    def around(self, application: ASGIApp) -> ASGIApp:
        """An ASGI application whose requests continue the caller's trace."""
        propagator = TraceContextTextMapPropagator()

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
            carried = {name: headers[name] for name in CARRIED if name in headers}
            token = context.attach(propagator.extract(carried))
            try:
                await application(scope, receive, send)
            finally:
                context.detach(token)

        return traced

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset_ns


def start(endpoint: str) -> Tracing:
    """Spans sent by OTLP over HTTP to `endpoint` (such as `http://localhost:4318/v1/traces`), in batches, from a thread."""
    provider = TracerProvider(resource=Resource.create({"service.name": "legato"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
