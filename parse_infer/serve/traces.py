"""A span of OpenTelemetry for every request, where `parse-infer serve --trace` asks for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import get_current_span

QUIET = "health,metrics"  # asked every few seconds by machines


class Traces:
    """Tells what became of a request; `note` is for the numbers that the log has too, never for texts.

    Args:
        processor: what takes the spans; default: OTLP over HTTP, in the background, to where OpenTelemetry's own
            variables say (OTEL_EXPORTER_OTLP_ENDPOINT and the others).
    """

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "parse-infer")
        self._provider = TracerProvider()
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))

    def watch(self, app: FastAPI) -> None:
        FastAPIInstrumentor.instrument_app(
            app, tracer_provider=self._provider, excluded_urls=QUIET, exclude_spans=["receive", "send"]
        )

    def note(self, fields: Mapping[str, Any]) -> None:
        get_current_span().set_attributes({f"parse.{name}": value for name, value in fields.items()})

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
