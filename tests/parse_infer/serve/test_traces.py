"""Spans of OpenTelemetry: one a request, with numbers and without texts."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry.instrumentation._semconv import _OpenTelemetrySemanticConventionStability
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.serve.traces import Traces
from tests.parse_infer.serve.conftest import running

SECRET = "what somebody wrote"
CALLER = "0af7651916cd43dd8448eb211c80319c"  # the trace that the client belongs to


def test_a_request_is_a_span_of_its_callers_trace(make_engine):
    spans, engine = InMemorySpanExporter(), make_engine()
    with running(ThreadRunner(make_engine()), engine, traces=Traces(SimpleSpanProcessor(spans))) as server:
        body = {"messages": [{"role": "user", "content": "Tom has 5 apples."}], "max_tokens": 8}
        headers, first = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"}, None
        for stream in (False, True):
            answer = server.post("/v1/chat/completions", {**body, "stream": stream}, headers=headers)
            assert answer.status_code == 200
            first = first or answer.json()
        assert server.metrics and server.post("/v1/chat/completions", {}, headers=headers).status_code == 400
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["POST /v1/chat/completions"] * 3, "one each, and none for the metrics"
    assert all(f"{span.context.trace_id:032x}" == CALLER for span in found)
    answered = found[0].attributes
    assert answered["parse.completion_tokens"] == 8 and answered["parse.answers"] == 1
    assert found[1].attributes["parse.completion_tokens"] == 8
    assert "parse.answers" not in found[2].attributes
    conventional = {name: value for name, value in answered.items() if name.startswith("gen_ai.")}
    assert conventional == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "parse",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": first["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.time_to_first_chunk": first["choices"][0]["parse"]["timings"]["first_text_s"],
        "gen_ai.usage.input_tokens": first["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
    }
    assert found[1].attributes["gen_ai.request.stream"] is True
    assert "Tom" not in str([dict(span.attributes) for span in found])


@pytest.mark.parametrize("conventions", ["", "http", "http/dup"])
def test_a_span_has_the_route_and_nothing_that_a_client_wrote(make_engine, monkeypatch, conventions):
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", conventions)
    monkeypatch.setattr(_OpenTelemetrySemanticConventionStability, "_initialized", False)
    spans = InMemorySpanExporter()
    with running(ThreadRunner(make_engine()), make_engine(), traces=Traces(SimpleSpanProcessor(spans))) as server:
        headers = {"User-Agent": "Sally", "Host": "Sally", "Referer": "Sally"}
        for path in ("/v1/models/Sally", "/Sally", "/v1/models?key=Sally"):
            httpx.get(server.url + path, headers=headers, timeout=60)
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["GET /v1/models/{name:path}", "GET", "GET /v1/models"]
    assert "Sally" not in "".join(span.to_json() for span in found)
    target = {"": "http.target", "http": "url.path", "http/dup": "url.path"}[conventions]
    assert [span.attributes[target] for span in found] == ["/v1/models/{name:path}", "other", "/v1/models"]


def test_a_span_of_a_request_that_failed_has_no_text(make_engine, monkeypatch):
    async def fails(*_: object) -> str:
        raise RuntimeError(SECRET)

    spans, runner = InMemorySpanExporter(), ThreadRunner(make_engine())
    for name in ("decode", "render"):
        monkeypatch.setattr(runner, name, fails)
    with running(runner, make_engine(), traces=Traces(SimpleSpanProcessor(spans))) as server:
        assert server.post("/detokenize", {"tokens": [65]}).status_code == 500
        assert server.chat().status_code == 500
    found = [span.to_json() for span in spans.get_finished_spans()]
    assert len(found) == 2 and SECRET not in "".join(found)
    assert all('"http.status_code": 500' in span for span in found)
