"""OpenTelemetry spans of requests, for `parse-infer serve --trace`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import Span, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

QUIET = "health,metrics"  # polled every few seconds


_TEXTS = {
    *("http.url", "http.target", "http.server_name", "http.host", "http.user_agent"),
    *("url.path", "url.query", "url.full", "user_agent.original"),
}


def _hide_texts(span: Span, scope: Mapping[str, Any]) -> None:
    """Replace the attributes that a client has written by the route, which `http.route` has too."""
    attributes = getattr(span, "attributes", None) or {}
    route = attributes.get("http.route", "other")
    span.set_attributes({name: route for name in _TEXTS & attributes.keys()})


class Traces:
    """Reports requests as spans; `note` adds the numbers of the log and `gen_ai.*` attributes, never text.

    Args:
        processor: span processor; default: OTLP over HTTP in the background, configured by OpenTelemetry's
            environment variables (such as OTEL_EXPORTER_OTLP_ENDPOINT).
    """

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "parse-infer")
        self._provider = TracerProvider()
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))

    def watch(self, app: FastAPI) -> None:
        FastAPIInstrumentor.instrument_app(
            app,
            tracer_provider=self._provider,
            excluded_urls=QUIET,
            exclude_spans=["receive", "send"],
            server_request_hook=_hide_texts,
        )

    def note(self, fields: Mapping[str, Any]) -> None:
        """Set attributes: names without a dot are PARSE's own."""
        named = {name if "." in name else f"parse.{name}": value for name, value in fields.items()}
        get_current_span().set_attributes(named)

    def headers(self) -> dict[str, str]:
        """Trace headers by which a server's spans become children of the current one."""
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)
        return headers

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
