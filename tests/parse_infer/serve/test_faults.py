"""What goes wrong: bad requests, full queues, clients that leave, requests that fail, and the end of the server."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from parse_infer.cli.app import main
from parse_infer.decoding import adaptive
from parse_infer.decoding.adaptive import MIN_SAMPLES
from parse_infer.decoding.plan import SourceKind
from parse_infer.drafters.source import Draft
from parse_infer.serve.admission import Limits
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.serve.app import create_app
from parse_infer.serve.logs import JsonLines
from parse_infer.serve.server import ApiServer, listen
from parse_infer.serve.thread_runner import ThreadRunner
from tests.parse_infer.serve.conftest import running

USER = [{"role": "user", "content": "Tom has 5 apples."}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LONG = 1500  # tokens, which take seconds


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The one sentence, in OpenAI's format."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    message = body["error"]["message"]
    assert message and "\n" not in message and len(message) < 400
    return body["error"]


BAD_BODIES = [
    (CHAT, b"", "JSON object"),
    (CHAT, b"{", "not valid JSON"),
    (CHAT, b'{"messages": "\xff"}', "not valid JSON in UTF-8"),
    (CHAT, b"[" * 100_000, "not valid JSON"),
    (CHAT, b"[]", "must be a JSON object"),
    (CHAT, b"null", "must be a JSON object"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages.0.content is not Unicode"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}", ""),
    (PLAIN, b'{"prompt": ["\\udfff"]}', "prompt.0 is not Unicode"),
]
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages is missing"),
    (CHAT, {"messages": []}, "at least 1"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "--backend vllm"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "empty"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "--backend vllm"),
    (CHAT, {"messages": USER, "model": 3}, "model"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "differ"),
    (CHAT, {"messages": USER, "temperature": -1}, "temperature"),
    (CHAT, {"messages": USER, "temperature": 1e-9}, "0.01"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
    (CHAT, {"messages": USER, "n": 17}, "n: "),
    (CHAT, {"messages": USER, "seed": 1 << 70}, "seed"),
    (CHAT, {"messages": USER, "stop": ""}, "stop"),
    (CHAT, {"messages": USER, "stop": ["a"] * 17}, "stop"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop.0: "),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "only with stream"),
    (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "--backend vllm"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "--backend vllm"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "--backend vllm"),
    (CHAT, {"messages": USER, "logprobs": True}, "logprob"),
    (CHAT, {"messages": USER, "frequency_penalty": 0.5}, "only null or 0"),
    (CHAT, {"messages": USER, "logit_bias": {"5": 1}}, "only null or {}"),
    (CHAT, {"messages": USER, "parse": 1}, "parse"),
    (CHAT, {"messages": USER, "parse": {"threshold": -0.1}}, "parse.threshold"),
    (CHAT, {"messages": USER, "parse": {"mode": "fast"}}, "parse.mode"),
    (CHAT, {"messages": USER, "parse": {"events": True}}, "parse.events: only with stream"),
    (CHAT, {"messages": USER, "parse": {"risk": 1}}, "parse.risk"),
    (CHAT, {"messages": USER, "parse": {"risk": 0.05}}, "this engine has no calibration"),
    (CHAT, {"messages": USER, "parse": {"adaptive": "perhaps"}}, "parse.adaptive"),
    (CHAT, {"messages": USER, "parse": {"mode": "exact"}, "temperature": 1}, "exact"),
    (CHAT, {"messages": USER, "parse": {"mode": "target", "draft_text": "x"}}, "no draft"),
    (CHAT, {"messages": USER, "parse": {"mode": "target", "risk": 0.05}}, "mode target has no promise"),
    (CHAT, {"messages": USER, "prediction": {"type": "content", "content": " "}}, "prediction"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "context window"),
    (PLAIN, {}, "prompt is missing"),
    (PLAIN, {"prompt": ""}, "empty"),
    (PLAIN, {"prompt": []}, "prompt: give"),
    (PLAIN, {"prompt": [[]]}, "empty"),
    (PLAIN, {"prompt": [1, "a"]}, "prompt.1: "),
    (PLAIN, {"prompt": ["a", 1]}, "prompt.1: "),
    (PLAIN, {"prompt": [[1], "a"]}, "prompt.1: "),
    (PLAIN, {"prompt": [[1], ["a"]]}, "prompt.1.0: "),
    (PLAIN, {"prompt": {}}, "prompt: give"),
    (PLAIN, {"prompt": "a", "min_tokens": 17}, "min_tokens is 17, but max_new_tokens is 16"),
    (PLAIN, {"prompt": "a", "stop_token_ids": [260]}, "260 is no token"),
    (PLAIN, {"prompt": "a", "stop_token_ids": [True]}, "stop_token_ids.0: "),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "'tokenize' is no option"),
    (CHAT, {"messages": USER, "structured_outputs": {"choice": ["a"]}}, "--backend vllm"),
    (CHAT, {"messages": USER, "parse": {"treshold": 1}}, "unknown field parse.treshold: did you mean 'threshold'?"),
    (CHAT, {"messages": USER, "parse": {"colour": 1}}, "unknown field parse.colour: leave it out"),
    (PLAIN, {"prompt": "a", "parse": {"blocktokens": 1}}, "parse.blocktokens: did you mean 'block_tokens'?"),
    (PLAIN, {"prompt": [True]}, "prompt: give"),
    (PLAIN, {"prompt": [1.0]}, "prompt: give"),
    (PLAIN, {"prompt": [260]}, "260 is no token"),
    (PLAIN, {"prompt": [-1]}, "-1 is no token"),
    (PLAIN, {"prompt": [5] * 3000}, "context window"),
    (PLAIN, {"prompt": ["a"] * 100}, "100 answers"),
    (PLAIN, {"prompt": "a", "logprobs": 0}, "logprob"),
    (PLAIN, {"prompt": "a", "echo": True}, "echo"),
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "either prompt or messages"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "--backend vllm"),
    ("/detokenize", {"tokens": [999]}, "999 is no token"),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message"), BAD_BODIES + BAD_FIELDS)
def test_the_response_to_a_bad_request_states_the_mistake(served, path, body, message):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(served.url + path, content=raw, headers={"Content-Type": "application/json"}, timeout=60)
    assert response.status_code == 400, response.text
    assert message in error_of(response)["message"]
    assert error_of(response)["type"] == "invalid_request_error"


def test_other_refusals_have_their_status(served):
    def status(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, error_of(response)["code"]

    assert status(served.chat(model="gpt-9")) == (404, "model_not_found")
    assert status(httpx.get(f"{served.url}/v1/models/gpt-9")) == (404, "model_not_found")
    assert status(httpx.get(f"{served.url}/v2")) == (404, "not_found")
    assert status(httpx.get(served.url + CHAT)) == (405, "method_not_allowed")
    large = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    kind = {"Content-Type": "application/json"}
    refused = httpx.post(served.url + PLAIN, content=large, headers=kind)
    assert status(refused) == (413, "body_too_large")
    assert error_of(refused)["message"] == (
        "the body has more than 4194304 bytes, the limit of this server's option --max-body-mb"
    )
    pieces = (large[i : i + 100_000] for i in range(0, len(large), 100_000))
    assert status(httpx.post(served.url + PLAIN, content=pieces, headers=kind)) == (413, "body_too_large")
    form = httpx.post(served.url + PLAIN, content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in error_of(form)["message"]
    with served.client as client, pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=USER, temperature=3)


def test_fields_without_influence_are_ignored(served):
    same = {"user": "me", "metadata": {"a": "b"}, "store": True, "tools": [], "tool_choice": "none", "logprobs": False}
    same |= {"frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}, "stop": None}
    plain, other = (served.chat(max_tokens=8, **fields).json()["choices"][0]["message"] for fields in ({}, same))
    assert plain == other


def test_a_request_without_the_key_is_refused(served):
    with running(served.runner, served.engine, keys=ApiKeys("s3cret")) as guarded:
        for headers in (
            {},
            {"Authorization": "Bearer s3cre"},
            {"Authorization": "s3cret"},
            {"Authorization": b"Bearer \xff"},
            {"X-API-Key": "s3cre"},
            {"X-API-Key": b"\xff"},
            {"X-API-Key": ""},
        ):
            response = httpx.get(guarded.url + "/v1/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
            assert httpx.get(guarded.url + "/metrics", headers=headers).status_code == 401  # type: ignore[arg-type]
        assert httpx.get(guarded.url + "/health").status_code == httpx.get(guarded.url + "/").status_code == 200
        for headers in ({"X-API-Key": "s3cret"}, {"X-API-Key": "s3cret", "Authorization": "Bearer none"}):
            for path in ("/v1/models", "/metrics"):
                assert httpx.get(guarded.url + path, headers=headers).status_code == 200
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="s3cret") as client:
            assert client.chat.completions.create(model="tiny", messages=USER, max_tokens=3).choices


def left(url: str, stream: bool) -> None:
    """A client that asks for much, and leaves when its answer has begun, or soon."""
    body = {"messages": USER, "max_tokens": LONG, "stream": stream, "parse": {"mode": "target"}}
    try:
        with httpx.stream("POST", url + CHAT, json=body, timeout=60 if stream else 0.2) as response:
            next(response.iter_lines())
    except httpx.TimeoutException:
        pass


@pytest.mark.slow
def test_a_disconnected_client_frees_the_engine(served):
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda i: left(served.url, stream=i % 3 == 0), range(24)))
    assert served.becomes_idle(5)  # the whole work would take a minute
    assert served.chat(max_tokens=4).status_code == 200


def test_work_ends_within_a_draft_too(served):
    body = {"messages": USER, "max_tokens": LONG}  # nothing is sent while the draft model writes
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=body, timeout=0.3)
    assert served.becomes_idle(2)


@pytest.mark.slow
def test_a_full_queue_sends_retry_after(served, monkeypatch):
    rendered, render = list[int](), served.runner.render

    async def counted(*arguments: Any, **options: Any) -> Any:
        rendered.append(1)
        return await render(*arguments, **options)

    monkeypatch.setattr(served.runner, "render", counted)
    with running(served.runner, served.engine, Limits(waiting=1)) as small, ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(small.chat, max_tokens=LONG, parse={"mode": "target"}) for _ in range(2)]
        while small.queue.answers < 2 and not any(answer.done() for answer in taken):
            time.sleep(0.005)
        refused = small.chat()
        assert refused.status_code == 429 and error_of(refused)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        small.queue.note(1000.0)
        assert int(small.chat().headers["retry-after"]) >= 1000
        assert [answer.result().status_code for answer in taken] == [200, 200]
    assert len(rendered) == 2, "what is not admitted is not rendered"


@pytest.mark.slow
def test_a_request_that_takes_too_long_ends_with_an_error(served):
    with running(served.runner, served.engine, Limits(request_s=0.3)) as hurried:
        response = hurried.chat(max_tokens=LONG)
        assert response.status_code == 504 and error_of(response)["code"] == "timeout"
        stream = hurried.chat(max_tokens=LONG, stream=True, parse={"mode": "target"})
        assert stream.status_code in (200, 504)  # 504: nothing was sent yet
        assert '"code":"timeout"' in stream.text and "[DONE]" not in stream.text
        with hurried.client as client, pytest.raises(openai.APIError, match=r"more than 0.3 s"):
            list(client.chat.completions.create(
                model="tiny", messages=USER, stream=True, max_tokens=LONG, extra_body={"parse": {"mode": "target"}}
            ))  # fmt: skip


SECRET = "what somebody wrote"


class Breaking:
    """A drafter that fails at the n-th draft of an answer."""

    forwards = 0
    kind = SourceKind(blocks=True)

    def __init__(self, nth: int) -> None:
        self._nth, self._asked = nth, 0

    def check(self, prompt: Any) -> None:
        pass

    def reset(self, prompt: Any, sampling: Any, stop: Any = ()) -> None:
        self._asked = 0

    def propose(self, answer_ids: Any, max_new_tokens: int) -> Draft:
        self._asked += 1
        if self._asked == self._nth:
            raise RuntimeError(f"no room for {SECRET}") from ValueError(SECRET)
        return Draft([65, 66, 67, 68])


def logged(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    text = capfd.readouterr().err
    assert SECRET not in text and "apples" not in text
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_the_log_names_the_place_of_a_failure_and_quotes_no_text(make_engine, capfd, monkeypatch):
    async def decode(ids: Any) -> str:
        raise RuntimeError(SECRET)

    back = {"parse": {"block_tokens": 8, "threshold": 0}, "max_tokens": 40}
    runner = ThreadRunner(make_engine(drafter=Breaking(2)))
    monkeypatch.setattr(runner, "decode", decode)
    with running(runner, make_engine()) as broken:
        failed = [broken.chat(**back), broken.chat(**back, stream=True), broken.post("/detokenize", {"tokens": [65]})]
    assert [response.status_code for response in failed] == [500, 200, 500]
    lines = logged(capfd)
    for response, function in zip(failed, ("propose", "propose", "decode"), strict=True):
        mine = [line for line in lines if line["id"] == response.headers["x-request-id"]]
        (failure,) = [line for line in mine if line["event"] == "failure"]
        assert next(line for line in mine if line["event"] == "request")["status"] == response.status_code
        assert failure["errors"][0]["class"] == "builtins.RuntimeError", failure
        assert failure["errors"][0]["frames"][-1].endswith(f" {function}")
        assert [error["class"] for error in failure["errors"][1:]] == ["builtins.ValueError"] * (function == "propose")


def test_the_lines_of_a_request_have_its_id_and_what_was_decided(make_engine, capfd, monkeypatch):
    monkeypatch.setattr(adaptive, "CLEAR_SPEEDUP", math.inf)  # else the pace on this machine decides
    with running(ThreadRunner(make_engine()), make_engine(), adaptive=True) as server:
        answers = [server.chat(max_tokens=8, n=2, parse={"threshold": 0, "adaptive": False}) for _ in range(2)]
        answers += [server.chat(max_tokens=8, stream=True, parse={"mode": "target"})]
        answers += [server.chat(max_tokens=8) for _ in range(2 * MIN_SAMPLES)]
    lines, modes = logged(capfd), []
    for response in answers:
        answered, request = [line for line in lines if line["id"] == response.headers["x-request-id"]]
        assert (answered["event"], request["event"]) == ("answered", "request")
        assert f'"id":"chatcmpl-{request["id"]}"' in response.text
        assert 0 < answered["seconds"] <= request["seconds"]
        modes.append((answered["answers"], answered["mode"], answered["adaptive"]))
    assert modes[:3] == [(2, "draft", False)] * 2 + [(1, "target", False)]
    assert sorted(modes[3:]) == [(1, "draft", True)] * MIN_SAMPLES + [(1, "target", True)] * MIN_SAMPLES


def test_the_log_has_the_route_of_a_request_and_not_its_path(make_engine, capfd):
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        for method, path in (("GET", f"v1/models/{SECRET}"), ("GET", SECRET), (SECRET.split()[0], "v1/models")):
            httpx.request(method, f"{server.url}/{path}?q={SECRET}", timeout=60)
    requests = [line for line in logged(capfd) if line["event"] == "request"]
    assert [line["path"] for line in requests][:2] == ["/v1/models/{name:path}", "other"]
    assert {line["method"] for line in requests} <= {"GET", "other"}


def test_a_failed_request_ends_no_other(make_engine):
    back = {"parse": {"block_tokens": 8, "threshold": 0}, "max_tokens": 40}
    with running(ThreadRunner(make_engine(drafter=Breaking(2))), make_engine(drafter=Breaking(2))) as broken:
        with ThreadPoolExecutor(4) as pool:
            bad = [pool.submit(broken.chat, **back) for _ in range(2)]
            good = [pool.submit(broken.chat, max_tokens=24, parse={"threshold": 1.01}) for _ in range(2)]
        for failed in bad:
            assert failed.result().status_code == 500 and error_of(failed.result())["code"] == "internal_error"
            assert SECRET not in failed.result().text  # what is inside stays inside
        own = broken.engine.generate("Tom has 5 apples.", max_new_tokens=24, threshold=1.01).text
        assert [one.result().json()["choices"][0]["message"]["content"] for one in good] == [own, own]
        stream = broken.chat(**back, stream=True)  # fails after the first text
        assert stream.status_code == 200 and "internal_error" in stream.text
        assert re.search(r'"content":"[^"]', stream.text)


def test_shutdown_waits_for_accepted_requests(make_engine):
    with (
        running(ThreadRunner(make_engine()), make_engine(), Limits(grace_s=30)) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        taken = [pool.submit(server.chat, max_tokens=200, parse={"mode": "target"}) for _ in range(3)]
        while server.queue.answers < 3 and not all(answer.done() for answer in taken):
            time.sleep(0.005)
        server.server.should_exit = True
        assert [answer.result().status_code for answer in taken] == [200, 200, 200]


def test_answers_unfinished_after_the_grace_period_get_an_error(make_engine):
    with (
        running(ThreadRunner(make_engine()), make_engine(), Limits(grace_s=0.2)) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        taken = [pool.submit(server.chat, max_tokens=LONG, parse={"mode": "target"}) for _ in range(3)]
        while server.queue.answers < 3:
            time.sleep(0.005)
        server.server.should_exit = True
        for answer in taken:
            assert answer.result().status_code == 503 and error_of(answer.result())["code"] == "stopping"


@pytest.mark.slow
def test_a_signal_under_load(folders):
    """The command starts, answers, gets a signal, and ends within its grace period."""
    arguments = ["serve", *folders, "--port", "0", "--grace", "1", "--served-model-name", "tiny", "--device", "cpu"]
    arguments += ["--strict", "--no-generation-config"]
    process = subprocess.Popen(
        [sys.executable, "-m", "parse_infer", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        found = re.match(r"tiny answers at (http://127\.0\.0\.1:\d+)/v1", process.stdout.readline())
        assert found, process.stderr.read()
        body = {"messages": USER, "max_tokens": LONG, "stream": True, "parse": {"mode": "target"}, "model": "tiny"}
        assert httpx.post(found[1] + CHAT, json={**body, "colour": 1}, timeout=60).status_code == 400
        texts: list[str] = []

        def ask() -> None:
            texts.append(httpx.post(found[1] + CHAT, json=body, timeout=60).text)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while "parse_answers_waiting 3.0" not in httpx.get(found[1] + "/metrics", timeout=60).text:
            time.sleep(0.05)
        process.terminate()
        begin = time.monotonic()
        _, log = process.communicate(timeout=60)
        assert time.monotonic() - begin < 1 + 5
        assert process.returncode == 0, "what it has started is cleaned up"
        for thread in threads:
            thread.join(10)
        assert len(texts) == 4 and all("[DONE]" in text or '"stopping"' in text for text in texts), texts
        lines = [json.loads(line) for line in log.splitlines()]
        assert sum(line["event"] == "request" and line["path"] == CHAT for line in lines) == 5
        assert "apples" not in log  # prompts are not logged
    finally:
        process.kill()
        process.wait()


def test_a_signal_ends_the_server_and_not_its_caller(served):
    """Who has models and folders to clean up."""
    raised: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: raised.append(number))
    server = ApiServer(create_app(served.runner), Limits())

    def stop() -> None:
        while not server.started:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        with listen("127.0.0.1", 0) as listening:
            threading.Thread(target=stop, daemon=True).start()
            server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not raised


def test_a_port_in_use_is_reported_before_any_model_loads(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--target", "no/such", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is in use" in error and error.count("\n") == 1
    assert main(["serve", "--host", "no such host", "--port", "0"]) == 2
    assert "cannot listen on no such host" in capsys.readouterr().err


def test_logs_are_one_object_a_line():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "request", None, None)
    record.fields = {"path": "/\n\ud800"}
    line = JsonLines().format(record)
    assert "\n" not in line and json.loads(line)["path"] == "/\n\ud800" and json.loads(line)["event"] == "request"


def test_metrics_count_what_was_answered(make_engine):
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        options = [{"threshold": t, "block_tokens": "whole"} for t in (0, 1.01)]
        answers = [server.chat(max_tokens=24, parse=parse).json() for parse in options]
        assert server.becomes_idle(5)
        end, counted = time.monotonic() + 10, 'parse_requests_total{path="/v1/chat/completions",status="200"} 2.0'
        while counted not in (text := server.metrics):  # a request counts after its last byte was sent
            assert time.monotonic() < end
            time.sleep(0.02)
    metrics = {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}
    spans = [span for answer in answers for span in answer["choices"][0]["parse"]["spans"]]
    for author in ("draft", "target"):
        own = sum(span["n_tokens"] for span in spans if span["source"] == author)
        assert metrics.get(f'parse_tokens_total{{author="{author}"}}', 0) == own
    assert metrics['parse_requests_total{path="/v1/chat/completions",status="200"}'] == 2
    assert metrics["parse_verification_pass_seconds_count"] == metrics["parse_time_to_first_token_seconds_count"] == 2
    assert metrics["parse_validity_ratio_count"] == 12  # a cut every 4 of 24 tokens, twice
    assert metrics["parse_inter_token_seconds_count"] > 10 and "parse_loop_lag_seconds_count" in metrics
    assert (metrics["parse_parallel"], metrics["parse_answers_running"], metrics["parse_answers_waiting"]) == (1, 0, 0)


def test_metrics_count_a_prompt_once_and_a_refusal_not_as_broken(make_engine):
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        prompt = server.chat(max_tokens=4, n=3).json()["usage"]["prompt_tokens"]
        assert f"parse_prompt_tokens_total {prompt:.1f}" in server.metrics
        assert server.chat(parse={"risk": 0.05}).status_code == 400  # the engine has no calibration
        assert "parse_answers_broken_total 0.0" in server.metrics


def test_the_server_listens_on_the_loopback_interface_by_default(capsys):
    assert main(["serve", "--help"]) == 0
    assert re.search(r"--host.*\[default: 127\.0\.0\.1\]", " ".join(capsys.readouterr().out.split()))
    with listen("127.0.0.1", 0) as listening:
        assert listening.family == socket.AF_INET and listening.getsockname()[0] == "127.0.0.1"


def test_an_idle_connection_lives_longer_than_in_a_proxy(served):
    """nginx and AWS's load balancers keep one for 60 s. The first to close it must not be the server."""
    assert served.server.config.timeout_keep_alive > 60


def test_an_answer_does_not_wait_for_nagle():
    """asyncio turns Nagle's delay off where a socket names its protocol; else every answer takes 40 ms more."""
    listening = listen("127.0.0.1", 0)
    assert listening.proto == socket.IPPROTO_TCP
    listening.close()
