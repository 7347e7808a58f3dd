"""Requests that a draft cannot speed up go to the target's own server, and its response to the client, as bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from parse_infer.serve import passthrough
from parse_infer.serve.admission import Limits
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.serve.conftest import running

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "How heavy are 5 apples?"}]
TOOLS = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}
KIND = {"Content-Type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
def canned(relaying):
    """A coordinator over servers that send `canned`, and their requests' bodies."""
    served, targets = relaying

    def answer(status: int, headers: dict[str, str], *pieces: bytes | None, pause: float = 0) -> None:
        for target in targets:
            target.canned, target.pause = (status, headers, list(pieces)), pause
            target.received = targets[0].received

    answer(200, KIND, b'{"choices": []}')
    return served, answer, targets[0].received


def sent_bodies(targets) -> list[dict]:
    return [body for target in targets for body in target.bodies]


def send(served, path: str, content: bytes) -> httpx.Response:
    return httpx.post(served.url + path, content=content, headers=KIND, timeout=60)


def test_a_tool_call_passes_through_and_is_marked(relaying):
    served, targets = relaying
    with served.client as client:
        raw = client.chat.completions.with_raw_response.create(
            model=served.runner.name,
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            user="me",
            extra_body={"parse": {"threshold": 0.5}},
        )
    answer: Any = raw.parse()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == '{"n": 5}'
    assert choice.message.reasoning == "by weight"
    assert raw.headers["x-parse-because"] == "tools" and answer.usage.completion_tokens == 6
    (body,) = sent_bodies(targets)
    own = {"model": targets[0].names[0], "messages": USER, "tools": TOOLS, "tool_choice": "required", "user": "me"}
    assert body == own, "all of the request but PARSE's own field"
    assert "parse_answers_relayed_total 1.0" in served.metrics


LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": TOOLS}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"logprobs": True, "top_logprobs": 3}, "logprobs"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
    (CHAT, {"presence_penalty": -0.5}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 1.1}, "repetition_penalty"),
    (CHAT, {"min_p": 0.1}, "min_p"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [*USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.1.role"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages.1.tool_calls"),
    (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"tools": TOOLS, "temperature": 9, "stop": ["x"] * 40}, "tools"),  # of which the server judges the rest
    (PLAIN, {"prompt": "a", "logprobs": 0}, "logprobs"),
    (PLAIN, {"prompt": "a", "echo": True}, "echo"),
    (PLAIN, {"prompt": "a", "best_of": 3}, "best_of"),
    (PLAIN, {"prompt": "a", "suffix": "b"}, "suffix"),
    (PLAIN, {"prompt": [1, 2], "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/tokenize", {"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.role"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "because"), LEFT_OUT, ids=[f"{f}"[:50] for _, f, _ in LEFT_OUT])
def test_a_request_that_a_draft_cannot_answer_reaches_the_target_unchanged(canned, path, fields, because):
    served, _, received = canned
    messages = {} if path == PLAIN or "messages" in fields else {"messages": USER}
    body = json.dumps({"mood": "gr\u00fc\u00df", "model": served.runner.name, **messages, **fields}, indent=1).encode()
    response = send(served, path, body)
    assert (response.status_code, response.content) == (200, b'{"choices": []}')
    assert response.headers["x-parse-because"] == because
    assert [json.loads(got) for got in received] == [json.loads(body)]
    assert received == [body], "the very bytes"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/responses?include=x", {"input": "2 + 2?", "stream": True}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9}),
        ("/v1/audio/speech", {"input": "a", "voice": "b"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_route_that_only_the_target_has_is_passed_through(engine, connect, path, fields):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b'{"data": []}']
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "accept": "text/event-stream"}
    with running(LoopRunner(coordinator), engine, model="public-name") as served:
        body = {"model": "public-name", **fields}
        response = httpx.post(served.url + path, json=body, headers={**trace, "x-other": "mine"}, timeout=60)
        assert (response.status_code, response.content) == (200, b'{"data": []}')
        assert response.headers["x-parse-because"] == "path"
        assert json.loads(target.received[0]) == {"model": target.names[0], **fields}
        (found, headers) = target.heads[0]
        assert found == path and {name: headers[name] for name in trace} == trace and "x-other" not in headers
        assert served.post(path, {"model": "another"}).status_code == 404 and len(target.received) == 1


def test_anthropics_headers_go_along_without_the_key(engine, connect):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b"{}"]
    own = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    with running(LoopRunner(coordinator), engine, keys=ApiKeys("s3cret")) as served:
        body = {"messages": USER, "max_tokens": 9}
        assert served.post("/v1/messages", body, headers={**own, "x-api-key": "s3cret"}).status_code == 200
        assert served.post("/v1/messages", body, headers=own).status_code == 401
    ((_, headers),) = target.heads
    assert {name: headers.get(name) for name in own} == own and "s3cret" not in headers.values()


def test_a_body_without_json_is_passed_through(engine, connect):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b'{"text": "a"}']
    with running(LoopRunner(coordinator), engine) as served:
        url = f"{served.url}/v1/audio/transcriptions"
        response = httpx.post(url, files={"file": ("a.wav", b"RIFF\x00\xff")}, timeout=60)
        assert response.json() == {"text": "a"} and b"RIFF\x00\xff" in target.received[0]
        assert target.heads[0][1]["content-type"].startswith("multipart/form-data; boundary=")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_1?include=x", b""),
        ("DELETE", "/v1/responses/resp_1", b""),
        ("POST", "/v1/responses/resp_1/cancel", b""),
        ("GET", "/v1/files", b""),
        ("PUT", "/v1/files/a.b-1", b"\x00"),
        ("PATCH", "/v1/files/1", b'{"a": 1}'),
    ],
)
def test_every_method_is_passed_through(engine, connect, method, path, body):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b'{"id": "resp_1"}']
    with running(LoopRunner(coordinator), engine) as served:
        kind = {"content-type": "application/octet-stream" if body[:1] == b"\x00" else "application/json"}
        sent = httpx.request(method, served.url + path, content=body, headers=kind if body else {}, timeout=60)
        assert (sent.status_code, sent.content, sent.headers["x-parse-because"]) == (200, b'{"id": "resp_1"}', "path")
    assert (target.methods, target.heads[0][0]) == ([method], path)
    assert target.received == [body] or json.loads(target.received[0]) == {"a": 1, "model": target.names[0]}
    assert target.heads[0][1].get("content-type") == (kind["content-type"] if body else None)


def test_a_stream_by_get_comes_as_it_is_written(canned):
    served, answer, _ = canned
    answer(200, {"Content-Type": "text/event-stream"}, *[b"data: {}\n\n"] * 1000, pause=0.05)
    with httpx.stream("GET", served.url + "/v1/responses/resp_1?stream=true") as response:
        assert next(response.iter_raw()).startswith(b"data: {}") and served.queue.answers == 1
    assert served.becomes_idle(5)


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapter/load", "/v1/%2e%2e/sleep"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_route_that_changes_the_targets_server_is_passed_through(canned, path, method):
    served, _, received = canned
    response = httpx.request(method, served.url + path, content=b'{"lora_name": "x"}', headers=KIND)
    assert (response.status_code, received) == (404, [])
    assert response.json()["error"]["code"] == "not_found"


CONTROLS = (
    # of vLLM 0.32
    *("pause", "resume", "sleep", "wake_up", "update_weights", "init_weight_transfer_engine", "abort_requests"),
    *("invocations", "reset_prefix_cache", "reset_mm_cache", "collective_rpc", "server_info", "scale_elastic_ep"),
    *("load_lora_adapter", "start_profile", "stop_profile", "release_kv_cache_memory", "fault_tolerance/apply"),
    # of SGLang
    *("flush_cache", "update_weights_from_disk", "release_memory_occupation", "resume_memory_occupation"),
    *("abort_request", "init_weights_update_group", "set_internal_state", "get_server_info", "freeze_gc"),
)


def test_no_control_of_a_server_is_passed_through(canned):
    served, _, received = canned
    with httpx.Client() as client:
        for path in CONTROLS:
            for method, prefix in (("GET", "/"), ("POST", "/"), ("POST", "/v1/%2e%2e/"), ("POST", "/v1//")):
                assert client.request(method, served.url + prefix + path, headers=KIND).status_code == 404, path
    assert not received


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("DELETE", "/v1/models/m"), ("POST", "/v1/models")])
def test_a_route_of_ours_has_our_methods_only(canned, method, path):
    served, _, received = canned
    response = httpx.request(method, served.url + path, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed") and not received


def test_a_route_that_no_server_has_is_the_clients_mistake(canned):
    """Such requests must not take a healthy server out."""
    served, answer, received = canned
    for n in range(1, 9):
        status = 404 if n % 2 else 501
        answer(status, KIND, b'{"detail": "Not Found"}')
        response = send(served, "/v1/nothing", b"{}")
        assert (response.status_code, response.json(), len(received)) == (status, {"detail": "Not Found"}, n)
    answer(404, KIND, b"{}")
    for n in range(9, 20):
        assert send(served, "/v1/some/tokenize", b"{}").status_code == 404 and len(received) == n
    assert "parse_target_servers_healthy 2.0" in served.metrics
    for body in (b"[1]", b"{", b'{"model": 5}'):
        assert send(served, "/v1/embeddings", body).status_code == 400 and len(received) == n


@pytest.mark.parametrize(
    ("field", "because"),
    [("guided_regex", "unknown field: guided_regex"), ("gr\u00fc\u00df e", "unknown field: of another name")],
)
def test_a_field_that_only_the_target_may_know_is_passed_through(engine, connect, capfd, field, because):
    """A field that changes the answer must not be ignored; with --strict it is refused."""
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b'{"choices": []}']
    body = {"messages": USER, field: "[a-z]+"}
    with running(LoopRunner(coordinator), engine) as served:
        response = served.post(CHAT, body)
        assert response.headers["x-parse-because"] == because and json.loads(target.received[0])[field] == "[a-z]+"
        assert served.post(CHAT, {"messages": [{**USER[0], "mood": "good"}]}).headers["x-parse-because"] == (
            "unknown field: messages.0.mood"
        )
    assert '"because": "unknown field"' in capfd.readouterr().err
    with running(LoopRunner(coordinator), engine, strict=True) as served:
        assert served.post(CHAT, body).status_code == 400 and len(target.received) == 2


def test_only_the_models_name_is_changed_for_the_target(engine, connect):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, KIND, [b"{}"]
    with running(LoopRunner(coordinator), engine, model="public-name") as served:
        body = {"messages": USER, "tools": TOOLS, "top_p": 0.25, "seed": 1 << 62, "parse": {"risk": 0.1}}
        for named in ({}, {"model": "public-name"}, {"model": None}):
            assert served.post(CHAT, body | named).status_code == 200
        expected = {name: value for name, value in body.items() if name != "parse"} | {"model": target.names[0]}
        assert [json.loads(got) for got in target.received] == [expected] * 3
        assert served.post(CHAT, body | {"model": "another"}).status_code == 404 and len(target.received) == 3


def test_switches_of_the_chat_template_are_passed_on(engine, connect, monkeypatch):
    coordinator, (target,), _ = connect(engine)
    monkeypatch.setattr(coordinator.target, "template_options", {"enable_thinking": False})
    with running(LoopRunner(coordinator), engine) as served:
        assert served.chat(tools=TOOLS).status_code == 200
        assert target.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        assert served.chat(tools=TOOLS, chat_template_kwargs={"brief": True}).status_code == 200
        assert target.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False, "brief": True}


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", "content_filter", None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_servers_own_bytes(canned, reason, stream):
    served, answer, _ = canned
    choice = {
        "index": 0,
        "finish_reason": reason,
        "delta" if stream else "message": {"content": "\u2028gr\u00fc\u00df"},
    }
    raw = json.dumps({"odd": [None, 1.50, "x"], "choices": [choice]}, ensure_ascii=False).encode()
    kind = {"Content-Type": "text/event-stream"} if stream else KIND
    raw = b": note\r\nevent: x\ndata:" + raw + b"\n\ndata: [DONE]" if stream else raw + b"\n"
    headers = {**kind, "X-Odd": "1", "Connection": "keep-alive, X-Hop", "X-Hop": "2"}
    answer(200, headers, raw[:9], raw[9:-3], raw[-3:])
    response = served.chat(tools=TOOLS, stream=stream)
    assert response.content == raw and response.headers["content-type"].startswith(kind["Content-Type"])
    assert response.headers["x-odd"] == "1" and "x-hop" not in response.headers
    assert response.headers["x-parse-because"] == "tools"


@pytest.mark.parametrize("status", [400, 402, 409, 413, 415, 422, 451])
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_is_the_servers_own(canned, status, stream):
    served, answer, received = canned
    answer(status, {"Content-Type": "text/plain", "X-Why": "no"}, b"not like", b" this")
    response = served.chat(tools=TOOLS, stream=stream)
    assert (response.status_code, response.content, response.headers["x-why"]) == (status, b"not like this", "no")
    assert len(received) == 1, "no other server would take it"


def test_a_stream_comes_as_it_is_written(canned):
    served, answer, _ = canned
    answer(200, {"Content-Type": "text/event-stream"}, *[b"data: {}\n\n"] * 1000, pause=0.05)
    with httpx.stream("POST", served.url + CHAT, json={"messages": USER, "tools": TOOLS, "stream": True}) as response:
        pieces = response.iter_raw()
        assert next(pieces).startswith(b"data: {}") and served.queue.answers == 1
    assert served.becomes_idle(5), "a client that leaves frees the seat"


@pytest.mark.parametrize("cut", [b'data: {"cho', b"data: {}\n\n", b"data: {}\r\n\r\ndata: {"])
def test_a_stream_that_breaks_off_ends_with_an_error(canned, cut):
    served, answer, received = canned
    answer(200, {"Content-Type": "text/event-stream"}, b"data: {}\n\n", cut, None)
    events = served.chat(tools=TOOLS, stream=True).text.replace("\r\n", "\n").strip().split("\n\n")
    *sent, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert sent in ([{}], [{}, {}]) and last["error"]["code"] == "target_unavailable"
    assert len(received) == 1, "what has begun is not begun again"
    assert served.becomes_idle(5)


def test_an_incomplete_response_is_retried(canned):
    served, answer, received = canned
    answer(200, {**KIND, "Content-Length": "100"}, b'{"choi', None)
    failed = served.chat(tools=TOOLS)
    assert failed.status_code == 503 and len(received) > 1


@pytest.mark.slow
def test_a_slow_stream_ends_with_an_error_at_the_time_limit(engine, connect):
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, {"Content-Type": "text/event-stream"}, [b"data: {}\n\n"] * 100
    target.pause = 0.1
    with running(LoopRunner(coordinator), engine, Limits(request_s=1.0)) as served:
        text = served.chat(tools=TOOLS, stream=True).text
        assert text.startswith("data: {}\n\n") and '"code":"timeout"' in text
        target.canned = 200, KIND, [b"1"] * 100
        assert served.chat(tools=TOOLS).status_code == 504
        assert served.becomes_idle(5)


@pytest.mark.slow
def test_a_client_that_stops_reading_loses_its_place_and_its_connection(engine, connect, monkeypatch):
    monkeypatch.setattr(passthrough, "LAST_WRITE_S", 0.1)
    coordinator, (target,), _ = connect(engine)
    target.canned = 200, {"Content-Type": "text/event-stream"}, [b"data: " + b"x" * (1 << 20) + b"\n\n"] * 64
    with running(LoopRunner(coordinator), engine, Limits(request_s=0.3, send_s=0.3)) as served:
        body = json.dumps({"messages": USER, "tools": TOOLS, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            while served.queue.answers == 0 and not served.server.server_state.total_requests:
                time.sleep(0.01)
            assert served.becomes_idle(20)
            end = time.monotonic() + 20
            while served.server.server_state.connections and time.monotonic() < end:
                time.sleep(0.05)
            assert not served.server.server_state.connections


def test_a_key_that_the_target_server_refuses_is_a_502(relaying, capfd):
    served, targets = relaying
    for target in targets:
        target.key = "another"
    with running(served.runner, served.engine) as server:
        refused = server.chat(tools=TOOLS)
    assert refused.status_code == 502 and refused.json()["error"]["code"] == "target_refuses"
    assert "(401)" in refused.json()["error"]["message"]
    assert "no answer: the target's server rejects a request (401)" in capfd.readouterr().err


def test_a_request_to_a_failed_server_is_retried_on_another(relaying):
    served, targets = relaying
    for target in targets:
        target.faults.append("500")
    assert served.chat(tools=TOOLS).status_code == 200
    assert len(sent_bodies(targets)) == 3


def test_servers_that_fail_again_and_again_are_503(relaying, capfd):
    served, targets = relaying
    for target in targets:
        target.faults.extend(["500"] * 2)
    with running(served.runner, served.engine) as server:
        failed = server.chat(tools=TOOLS)
    assert failed.status_code == 503 and int(failed.headers["Retry-After"]) >= 1
    assert failed.json()["error"]["message"] == "this model's servers failed: try again in 5 s"
    log = capfd.readouterr().err
    assert "no answer: the target servers failed 4 times" in log and '"errors"' not in log


def test_passed_answers_are_logged_and_count_with_n(relaying, capfd):
    served, targets = relaying
    with running(served.runner, served.engine) as server:
        assert server.chat(tools=TOOLS, n=3).status_code == 200 and sent_bodies(targets)[0]["n"] == 3
        assert "parse_answers_relayed_total 3.0" in server.metrics
        assert server.chat(tools=TOOLS, n=10**9).status_code == 400, "more seats than there are"
    line = next(json.loads(line) for line in capfd.readouterr().err.splitlines() if '"answered"' in line)
    assert (line["mode"], line["because"], line["answers"]) == ("target", "tools", 3)


def test_what_no_server_can_answer_is_refused_in_one_sentence(canned):
    served, _, received = canned
    deep = "[" * 900 + "]" * 900
    for body, message in (
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [1], "model": 3}', "model"),
        (f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": {deep}}}', "nested too deeply"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', "temperature"),
    ):
        response = send(served, CHAT, body.encode())
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 200 or message in response.json()["error"]["message"]
    assert len(received) <= 1


def test_own_replies_are_accepted_as_history(relaying):
    """Also those with reasoning only, whose content is null; the draft and target then answer together."""
    served, _ = relaying
    own = served.chat(max_tokens=4).json()["choices"][0]["message"]
    for reply in (own, {**own, "content": None}, {"role": "assistant", "content": None, "tool_calls": None}):
        body = {"messages": [*USER, reply, *USER], "max_tokens": 4}
        response = served.post(CHAT, body)
        assert response.status_code == 200 and "x-parse-because" not in response.headers, response.text
    assert served.post(CHAT, {"messages": [{"role": "user", "content": None}]}).status_code == 400


def test_neutral_values_are_answered_here(relaying):
    served, targets = relaying
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "n": 1}
    neutral |= {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "reasoning_effort": None}
    response = served.chat(max_tokens=4, **neutral)
    assert response.status_code == 200 and "x-parse-because" not in response.headers
    assert response.json()["choices"][0]["parse"]["spans"] and all(
        "tools" not in body for body in sent_bodies(targets)
    )


def test_a_client_gets_the_servers_message(relaying):
    served, _ = relaying
    with served.client as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.runner.name, messages=USER, tools=TOOLS, tool_choice="auto")
    assert refused.value.body["message"] == '"auto" tool choice requires --enable-auto-tool-choice'


class Slow(FakeServer):
    """Answers chats once `free` is set."""

    free = threading.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await asyncio.to_thread(self.free.wait, 30)
        return await super().chat(request)


@pytest.mark.slow
def test_a_wave_of_passed_requests_leaves_the_seats_of_other_answers_free(engine, connect):
    Slow.free.clear()
    coordinator, _, _ = connect(engine, server_type=Slow, parallel=1)
    with running(LoopRunner(coordinator), engine) as served, ThreadPoolExecutor(3) as pool:
        wave = [pool.submit(served.chat, tools=TOOLS, tool_choice="required") for _ in range(3)]
        try:
            while served.queue.answers < len(wave):
                time.sleep(0.01)
            own = served.chat(max_tokens=8)
            assert own.status_code == 200 and "x-parse-because" not in own.headers
            assert not any(answer.done() for answer in wave)
        finally:
            Slow.free.set()
        assert {answer.result().status_code for answer in wave} == {200}
