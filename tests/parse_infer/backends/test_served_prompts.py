"""HTTP over servers: no request blocks the event loop that all requests share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from parse_infer.serve.admission import Limits
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.language_models import language_model, word_tokenizer
from tests.parse_infer.serve.conftest import running

PROMPT = "Tom has 5 apples."


def watch(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> list[str]:
    """Names of the threads that apply the chat template, also those of copies."""
    threads, apply = [], tokenizer.apply_chat_template

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return apply(*args, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noted, raising=False)
    return threads


@pytest.fixture(params=["shared tokens", "other tokens"])
def pair(request, make_engine, make_model):
    engine = make_engine()
    if request.param == "other tokens":
        words = word_tokenizer()
        engine.backend.draft = language_model(make_model("llama", vocab_size=300), words, "draft")
    return engine


def test_a_prompt_is_rendered_once_and_not_by_the_event_loop(pair, connect, monkeypatch):
    coordinator, _, _ = connect(pair)
    own = coordinator.generate([PROMPT, PROMPT], max_new_tokens=12, threshold=0.0)
    tokenizers = {id(part.tokenizer): part.tokenizer for part in (pair.target, pair.draft)}
    seen = [watch(monkeypatch, tokenizer) for tokenizer in tokenizers.values()]
    with running(LoopRunner(coordinator), pair) as served:
        for threads in seen:
            threads.clear()  # what the models' end tokens are is found out once
        answer = served.chat(PROMPT, max_tokens=12, n=2, parse={"threshold": 0}).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [g.text for g in own]
    for threads in seen:
        assert len(threads) == 1 and threads[0].startswith("parse-tokenizer"), seen


def test_tokens_of_a_prompt_reach_a_draft_model_with_other_tokens_as_text(pair, connect):
    coordinator, _, draft = connect(pair)
    with running(LoopRunner(coordinator), pair) as served:
        ids = pair.target.tokenizer.encode(PROMPT)
        answer = served.post("/v1/completions", {"prompt": ids, "parse": {"threshold": 0}})
        assert answer.status_code == 200 and draft.bodies[0]["prompt"] == pair.draft.tokenizer.encode(PROMPT)
        again = served.post("/v1/completions", {"prompt": PROMPT, "parse": {"threshold": 0}})
        assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]


def test_a_draft_of_the_clients_is_read_by_another_thread(engine, connect, monkeypatch):
    coordinator, _, draft = connect(engine)
    threads, text = [], " It has 5."
    encode = engine.target.tokenizer.encode

    def noted(spelt: str, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name if text in spelt else "parse-tokenizer")
        return encode(spelt, *args, **options)

    monkeypatch.setattr(engine.target.tokenizer, "encode", noted, raising=False)
    own = engine.generate(PROMPT, draft_text=text, threshold=0.0, max_new_tokens=20)
    threads.clear()
    with running(LoopRunner(coordinator), engine) as served:
        found = served.chat(PROMPT, max_tokens=20, parse={"draft_text": text, "threshold": 0}).json()
        assert found["choices"][0]["message"]["content"] == own.text and not draft.bodies
        empty = served.chat(PROMPT, parse={"draft_text": " "})
        assert empty.status_code == 400 and "give a non-empty text" in empty.json()["error"]["message"]
    assert threads and all(name.startswith("parse-tokenizer") for name in threads), threads


@pytest.mark.slow
def test_a_slow_template_delays_no_other_request_and_has_the_time_limit(engine, connect, monkeypatch):
    begun, end, apply = threading.Event(), threading.Event(), engine.target.tokenizer.apply_chat_template

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        assert end.wait(60)
        return apply(*args, **options)

    coordinator, targets, _ = connect(engine)
    monkeypatch.setattr(engine.target.tokenizer, "apply_chat_template", slow, raising=False)
    backend = LoopRunner(coordinator)
    with running(backend, engine, Limits(request_s=1.0)) as served, ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(served.chat, PROMPT, max_tokens=4, stream=stream) for stream in (False, True)]
        pending.append(pool.submit(served.post, "/tokenize", {"messages": [{"role": "user", "content": "a"}]}))
        assert begun.wait(30)
        assert httpx.get(f"{served.url}/health").status_code == 200  # while the template is at work
        assert [answer.result().status_code for answer in pending] == [504] * 3 and not end.is_set()
        assert not targets[0].bodies
        end.set()
        assert served.chat(PROMPT, max_tokens=4).status_code == 200
    assert coordinator.running == 0
