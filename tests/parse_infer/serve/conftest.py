"""Servers of tiny random models, on real sockets in threads of this process, and the engines to compare them with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from parse_infer.engine import ParseEngine
from parse_infer.serve import server as server_module
from parse_infer.serve.admission import AdmissionQueue, Limits
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.serve.app import create_app
from parse_infer.serve.server import ApiServer, listen
from parse_infer.serve.settings import ApiSettings, RiskSettings
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.serve.traces import Traces
from tests.parse_infer.language_models import language_model, printable, resembling, short_question


@dataclass
class Running:
    """A server, and an engine with the same weights."""

    url: str
    runner: ThreadRunner
    queue: AdmissionQueue
    server: ApiServer
    engine: ParseEngine

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def chat(self, content: str = "Tom has 5 apples.", headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body, headers=headers)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def becomes_idle(self, seconds: float) -> bool:
        """Whether nothing is being written or waits any more, at the latest then."""
        end = time.monotonic() + seconds
        while self.runner.running or self.queue.answers:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


@pytest.fixture(scope="session", autouse=True)
def _heap_stays_thawed() -> Iterator[None]:
    """A process of tests starts and drops many models, which a frozen heap would keep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "freeze_heap", lambda: None)
        yield


@contextmanager
def running(
    runner: ThreadRunner,
    engine: ParseEngine,
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    risk_settings: RiskSettings | None = None,
    traces: Traces | None = None,
    **options: Any,
) -> Iterator[Running]:
    """`options`: further fields of `ApiSettings`."""
    listening = listen("127.0.0.1", 0)
    limits = limits or Limits()
    settings = ApiSettings(limits, keys or ApiKeys(), risk_settings=risk_settings or RiskSettings(), **options)
    app = create_app(runner, settings, traces)
    server = ApiServer(app, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", runner, app.state.queue, server, engine)
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="session")
def make_engine(make_model, tokenizer) -> Callable[..., ParseEngine]:
    """`make_engine()`: always the same weights. `readable`: only printable text, else any bytes."""

    def make(readable: bool = True, **options: Any) -> ParseEngine:
        target = make_model("llama")
        draft = resembling(make_model, target, 0.1)
        if readable:
            target, draft = printable(target, tokenizer), printable(draft, tokenizer)
        judge = short_question(target, tokenizer, ("Good", "True"))  # either is as likely, so drafts are kept in part
        if "drafter" in options:
            return ParseEngine.from_models(language_model(target, tokenizer), None, judge, **options)
        return ParseEngine.from_models(
            language_model(target, tokenizer, "tiny"), language_model(draft, tokenizer, "draft"), judge, **options
        )

    return make


@pytest.fixture(scope="session")
def served(make_engine) -> Iterator[Running]:
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        yield server


@pytest.fixture(scope="session")
def served_bytes(make_engine) -> Iterator[Running]:
    """Its models write any bytes, mostly such as are no text."""
    with running(ThreadRunner(make_engine(readable=False)), make_engine(readable=False)) as server:
        yield server


@pytest.fixture(scope="session")
def folders(make_engine, random_adapter, tokenizer, tmp_path_factory) -> list[str]:
    """Options for the same tiny models on disk."""
    engine, folder = make_engine(), tmp_path_factory.mktemp("models")
    for name, part in (("target", engine.target), ("draft", engine.draft)):
        part.model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    random_adapter(engine.target.model).save_pretrained(folder / "adapter")
    return [part for name in ("target", "draft", "adapter") for part in (f"--{name}", str(folder / name))]
