"""Headers by which servers know for which request they are asked."""

from __future__ import annotations

import json
import time

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from parse_infer.backends.pool import health
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.serve.traces import Traces
from tests.parse_infer.serve.conftest import running

CALLER = "0af7651916cd43dd8448eb211c80319c"  # the trace that the client belongs to


@pytest.mark.parametrize("traced", [False, True])
def test_servers_get_the_trace_and_an_id_that_the_log_has(engine, connect, traced):
    coordinator, servers, draft = connect(engine)
    spans = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(spans)) if traced else None
    target = servers[0]
    with running(LoopRunner(coordinator), engine, traces=traces) as server:
        body = {"messages": [{"role": "user", "content": "Tom has 5 apples."}], "max_tokens": 8}
        for each in (target, draft):
            each.headers.clear()  # of the handshake
        sent = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01", "tracestate": "a=b"}
        answer = server.post("/v1/chat/completions", body | {"parse": {"threshold": 0.5}}, headers=sent)
        drafted = [*target.headers, *draft.headers]
        target.headers.clear()
        passed = server.post("/v1/chat/completions", body | {"logprobs": True}, headers=sent)
    assert len(drafted) >= 2 and len(target.headers) == 1
    for response, requests in ((answer, drafted), (passed, target.headers)):
        ids = [headers["x-request-id"] for headers in requests]
        assert len(set(ids)) == len(ids), "a server may refuse an id in use"
        assert {id.rpartition("-")[0] for id in ids} == {response.headers["x-request-id"]}
        assert {headers["traceparent"].split("-")[1] for headers in requests} == {CALLER}
    parents = {headers["traceparent"].split("-")[2] for headers in [*drafted, *target.headers]}
    own = {f"{span.context.span_id:016x}" for span in spans.get_finished_spans()}
    assert parents == (own if traced else {"b7ad6b7169203331"}) and all(h["tracestate"] == "a=b" for h in drafted)


def test_the_log_has_the_id_that_a_server_gave_a_passed_request(engine, connect, capfd):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, {"Content-Type": "application/json", "X-Request-Id": "theirs-7"}, [b'{"data": []}']
    with running(LoopRunner(coordinator), engine) as server:
        response = server.post("/v1/embeddings", {"input": "a"})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (answered,) = [line for line in lines if line["event"] == "answered"]
    assert answered["upstream_id"] == "theirs-7" and answered["id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("traced", [False, True])
def test_the_log_has_the_trace_and_the_clients_own_id(engine, connect, capfd, traced):
    coordinator, _, _ = connect(engine)
    traces = Traces(SimpleSpanProcessor(InMemorySpanExporter())) if traced else None
    own = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01", "x-request-id": "theirs-7"}
    bad = {"traceparent": f"00-{CALLER}-what", "x-request-id": "what somebody wrote"}
    long = {"x-request-id": "7" * 65}
    with running(LoopRunner(coordinator), engine, traces=traces) as server:
        ids = [server.chat(max_tokens=2, headers=sent).headers["x-request-id"] for sent in (own, bad, long, {})]
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    first = [line for line in lines if line.get("id") == ids[0]]
    assert {line["event"] for line in first} == {"answered", "request"}
    assert {(line["trace_id"], line["client_request_id"]) for line in first} == {(CALLER, "theirs-7")}
    others = [line for line in lines if line.get("id") in ids[1:]]
    assert len(others) == 6 and not any("client_request_id" in line for line in others)
    assert all(("trace_id" in line) == traced and CALLER not in line.values() for line in others)
    assert "what" not in text and "theirs-7" not in ids


def test_health_checks_belong_to_no_request(engine, connect, monkeypatch):
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.1)
    coordinator, (target,), _ = connect(engine)
    with running(LoopRunner(coordinator), engine) as server:
        assert server.chat(max_tokens=4).status_code == 200  # the first request starts the checks
        replica = coordinator.backend.servers["target"].members[0]
        replica.examined = False
        target.headers.clear()
        end = time.monotonic() + 10
        while not (replica.examined and target.headers) and time.monotonic() < end:
            time.sleep(0.05)
    assert target.headers and all("x-request-id" not in headers for headers in target.headers)
