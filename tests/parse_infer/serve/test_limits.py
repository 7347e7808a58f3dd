"""One client with cheap requests cannot stop the server for others."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import time
from contextlib import suppress
from threading import Event

import httpx
import pytest

from parse_infer.serve import handlers, response, runner, server
from parse_infer.serve.admission import Limits
from parse_infer.serve.errors import ApiError
from parse_infer.serve.runner import TokenPrompt, size_of
from parse_infer.serve.server import _connections, freeze_heap
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.text.prompts import Chat, Verbatim
from tests.parse_infer.serve.conftest import Running, running

USER = {"role": "user", "content": "Tom has 5 apples."}
CHAT = "/v1/chat/completions"
PARTS = [{"type": "text", "text": "a"}] * 1025


def raw(served: Running, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=30)
    connection.sendall(data)
    return connection


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(served, monkeypatch):
    monkeypatch.setattr(served.runner, "_call", lambda *_: pytest.fail("tokenized"))
    size = served.runner._longest_prompt + 1
    for path, body in (
        (CHAT, {"messages": [{**USER, "content": "x" * size}]}),
        ("/v1/completions", {"prompt": "x" * size}),
    ):
        refused = served.post(path, body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert f"{size} characters" in refused.json()["error"]["message"]
    for fields in ({"parse": {"draft_text": "x" * size}}, {"prediction": {"type": "content", "content": "x" * size}}):
        refused = served.chat(**fields)
        assert refused.status_code == 400 and f"draft text has {size} char" in refused.json()["error"]["message"]
    refused = served.post("/v1/completions", {"prompt": [65] * (served.runner.window + 1)})
    assert refused.status_code == 400 and "2049 tokens" in refused.json()["error"]["message"]


def test_a_prompt_that_may_fit_is_tokenized(served):
    """The limit is that of the longest token: no prompt that fits is refused by its length."""
    tokenizer, window = served.engine.target.tokenizer, served.runner.window
    longest = max(tokenizer.get_vocab(), key=len)
    assert len(tokenizer.decode(tokenizer.convert_tokens_to_ids([longest] * window))) <= served.runner._longest_prompt


@pytest.mark.parametrize(
    "prompt",
    [
        Chat([{**USER, "content": "abc"}] * 2, {}),
        Chat([{**USER, "content": "ab", "reasoning": "c"}] * 2, {}),
        Verbatim("abcdef"),
        TokenPrompt([5] * 6),
        "abcdef",
    ],
)
def test_sizes(prompt):
    assert size_of(prompt) == 6


def test_tokenize_takes_little_text_and_a_place(served, monkeypatch):
    monkeypatch.setattr(handlers, "LONGEST_TOKENIZED", 10)
    assert served.post("/tokenize", {"prompt": "x" * 10}).status_code == 200
    refused = served.post("/tokenize", {"prompt": "x" * 11})
    assert refused.status_code == 400 and "at most 10" in refused.json()["error"]["message"]
    chat = served.post("/tokenize", {"messages": [{**USER, "content": "x" * 11}]})
    assert chat.status_code == 400
    monkeypatch.setattr(served.queue, "_capacity", 0)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})):
        assert served.post(path, body).status_code in (400, 429)


def test_short_texts_do_not_wait_for_long_ones(served, monkeypatch):
    monkeypatch.setattr(runner, "LONG_TEXT", 8)
    free, began = Event(), Event()

    def block(thread):
        began.set()
        free.wait(30)

    served.runner._long._executor.submit(block, None)
    try:
        assert began.wait(30)
        assert served.post("/tokenize", {"prompt": "3 apples"}).status_code == 200
        hung_up = raw(served, _request("/tokenize", {"prompt": "a longer text"}))
        while served.queue.answers == 0:
            time.sleep(0.01)
        hung_up.close()
        assert served.becomes_idle(10), "the seat of a client that hung up is free"
        assert served.runner._long._executor._work_queue.qsize() <= 1  # cancelled, so it will not run
    finally:
        free.set()


def _request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


@pytest.mark.slow
def test_collections_leave_out_what_was_loaded(make_engine, monkeypatch):
    counts = []
    monkeypatch.setattr(server, "freeze_heap", lambda: (freeze_heap(), counts.append(gc.get_freeze_count())))
    engine = make_engine()
    try:
        with running(ThreadRunner(engine), engine) as served:
            assert httpx.get(served.url + "/health", timeout=60).is_success and counts[0] > 10_000
    finally:
        gc.unfreeze()


def test_a_blocked_loop_is_measured(monkeypatch):
    monkeypatch.setattr(server, "_LAG_EVERY_S", 0.01)
    lags: list[float] = []

    async def block() -> None:
        measured = asyncio.Event()
        task = asyncio.create_task(server.measure_lag(lambda lag: (lags.append(lag), measured.set())))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  # the fault
        await measured.wait()
        task.cancel()

    asyncio.run(block())
    assert lags[0] > 0.15


def test_many_connections_fit():
    room = _connections()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 64 <= room < soft <= hard or soft == resource.RLIM_INFINITY


@pytest.fixture
def hasty(make_engine) -> Running:
    engine = make_engine()
    with running(ThreadRunner(engine), engine, Limits(send_s=0.3)) as served:
        yield served


HALF = _request("/tokenize", {"prompt": "3 apples"})


def test_half_sent_requests_are_closed(hasty):
    connections = {part: raw(hasty, part) for part in (b"", b"POST /tokenize HT", HALF[:40], HALF[:-3])}
    second = raw(hasty, HALF)
    assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
    second.sendall(HALF[:20])
    for part, connection in {**connections, HALF[:20]: second}.items():
        with suppress(ConnectionResetError):
            assert not connection.recv(1 << 16).startswith(b"HTTP/1.1 2"), part


@pytest.mark.slow
def test_an_answer_in_progress_is_not_closed(hasty):
    with httpx.Client(timeout=60) as client:
        for _ in range(2):  # and the connection between two requests
            body = {"messages": [USER], "max_tokens": 64, "ignore_eos": True}
            assert client.post(hasty.url + CHAT, json=body).status_code == 200
            time.sleep(0.5)


def test_a_paused_reader_gets_the_error_when_it_resumes():
    sent, stopped, reads_on = [], asyncio.Event(), asyncio.Event()

    async def send(message):
        if len(sent) == 2 and not reads_on.is_set():
            stopped.set()
            await reads_on.wait()
        sent.append(message)

    async def events():
        for number in range(3):
            yield response.event_line(number)

    async def main():
        task = asyncio.create_task(response.write_events(send, events()))
        await stopped.wait()
        task.cancel()  # as the time limit does
        await asyncio.sleep(0)
        reads_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert b'"code":"timeout"' in sent[-1]["body"] and sent[-1]["more_body"] is False


@pytest.mark.parametrize("fails", [False, True])
def test_a_silent_stream_gets_comments(monkeypatch, fails):
    """Also before the first event; then an error cannot set the status."""
    monkeypatch.setattr(response, "KEEP_ALIVE_S", 0.05)
    sent, kept = [], asyncio.Event()  # set after the head and three comments

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            kept.set()

    async def events():
        await kept.wait()
        if fails:
            raise ApiError(503, "no server")
        for number in range(3):
            yield response.event_line(number)
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(response.write_events(send, events()), 30))
    comment, bodies = b": keep-alive\n\n", [message["body"] for message in sent[1:]]
    assert sent[0]["status"] == 200 and bodies[:3] == [comment] * 3
    rest = [body for body in bodies if body != comment]
    if fails:
        assert len(rest) == 1 and b"no server" in rest[0]
    else:
        assert rest == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]


def test_openai_reads_a_stream_with_comments(served, monkeypatch):
    monkeypatch.setattr(response, "KEEP_ALIVE_S", 0.0005)
    with served.client as client:
        chunks = list(client.chat.completions.create(model=served.runner.name, messages=[USER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) and chunks[-1].choices[0].finish_reason


def test_events_have_no_characters_at_which_readers_of_lines_split():
    text = "a\u2028b\u2029c\x85d\re"
    line = response.event_line({"text": text}).decode()
    assert len(line.removesuffix("\n\n").splitlines()) == 1 and json.loads(line.removeprefix("data: ")) == {
        "text": text
    }


def test_a_seed_of_minus_one_is_random(served):
    def text(seed: int) -> str:
        return served.chat(seed=seed, temperature=1.0, max_tokens=24).json()["choices"][0]["message"]["content"]

    assert text(5) == text(5) and len({text(-1) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["x"] * 17}, "stop: give at most 16 texts, not 17"),
        ({"stop": [5]}, "stop"),
        ({"messages": [{**USER, "content": PARTS}]}, "messages.0.content: list should have at most 1024 items"),
        ({"prediction": {"type": "content", "content": PARTS}}, "prediction.content: list should have at most 1024"),
        (
            {"chat_template_kwargs": json.loads('{"a":' * 900 + "1" + "}" * 900)},
            "chat_template_kwargs: the object is nested",
        ),
    ],
)
def test_an_unusual_value_of_a_field_is_an_error_of_one_sentence(served, fields, message):
    refused = served.post(CHAT, {"messages": [USER], **fields})
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(message)


def test_health_answers_head_and_metrics_have_the_process(served):
    for path in ("/health", "/ready", "/", "/page.js", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"):
        head, whole = httpx.head(served.url + path), httpx.get(served.url + path)
        assert (head.status_code, head.content) == (200, b"") and whole.content, path
    assert httpx.head(f"{served.url}{CHAT}").status_code == 405 and httpx.head(f"{served.url}/v2").status_code == 404
    assert "process_resident_memory_bytes" in served.metrics and "process_open_fds" in served.metrics
