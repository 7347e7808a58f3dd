"""A server that runs another model than before is noticed, and gets no requests."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from parse_infer.backends.pool import health
from parse_infer.backends.servers import target as target_module
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.engine import ParseEngine
from parse_infer.judge.rules.min_p import MinP
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.serve.settings import RiskSettings
from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.backends.test_answers_over_servers import PROMPT
from tests.parse_infer.language_models import language_model, printable, word_tokenizer
from tests.parse_infer.serve.conftest import running

SETTINGS = {"max_new_tokens": 24, "threshold": 0.0}


@pytest.mark.slow
def test_a_server_that_was_offline_at_the_start_is_examined(engine, connect, make_model):
    coordinator, targets, _ = connect(engine, n_targets=2)
    servers = coordinator.backend.servers["target"]
    targets[0].offline = True
    coordinator.backend.run(coordinator.backend.handshake())
    assert [server.healthy for server in servers.members] == [False, True]
    words = word_tokenizer()
    own, targets[0].lm = targets[0].lm, language_model(make_model("llama", seed=15, vocab_size=300), words, "target")
    targets[0].offline = False
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    assert soon(coordinator, lambda: "has other tokens than" in servers.members[0].last_error)
    assert not servers.members[0].healthy
    targets[0].lm = own
    assert soon(coordinator, lambda: servers.members[0].healthy)
    assert any(body.get("prompt_logprobs") for body in targets[0].bodies), "whether it can judge was tried"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda server: server.names.__setitem__(0, "other"), "serves 'other' and not"),
        (lambda server: setattr(server, "root", "/models/other"), "now serves '/models/other', before"),
        (lambda server: setattr(server.lm, "window", 8), "now has a window of 8 tokens"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_server_with_another_model_is_unused(engine, connect, quick_checks, monkeypatch, change, said, role):
    coordinator, (target,), draft = connect(engine)
    coordinator.generate(PROMPT, **SETTINGS)
    server = target if role == "target" else draft
    (member,) = coordinator.backend.servers[role].members
    monkeypatch.setattr(server.lm, "window", server.lm.window)
    change(server)
    assert soon(coordinator, lambda: not member.healthy)
    assert said in member.last_error


def run_model(server: FakeServer, lm: LanguageModel) -> None:
    server.lm, server.decoder = lm, Decoder(lm.model, ())


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    assert what()


@pytest.mark.parametrize("judge", ["adapter", "rule"])
@pytest.mark.parametrize("restarts", [True, False])
def test_a_promise_has_no_target_whose_weights_have_changed(
    make_engine, connect, make_model, tokenizer, quick_checks, monkeypatch, judge, restarts
):
    """Its name and files are those of before; a rule has no log-probabilities of the target to compare with."""
    monkeypatch.setattr(health, "RETRY_EVERY_S", 0.02)
    monkeypatch.setattr(target_module, "RECOGNISE_EVERY_S", 0.0)
    engine = make_engine()
    if judge == "rule":
        engine = ParseEngine.from_models(engine.target, engine.draft, MinP().load(tokenizer))
    coordinator, (target,), _ = connect(engine, patience_s=0.1)
    tried = [TestedPoint(OperatingPoint(0.3, 8), 0, 0.04, 2.0, 0.1)]
    coordinator.calibrations = (Calibration("t", 300, "x", "lost", 0.9, 24, coordinator.describe(), tried, {0.9: 0}),)
    other = language_model(printable(make_model("llama", seed=3), tokenizer), tokenizer, "target")
    with running(LoopRunner(coordinator), engine, risk_settings=RiskSettings(0.9)) as served:

        def ready() -> bool:
            return httpx.get(f"{served.url}/ready", timeout=60).status_code == 200

        assert ready() and served.chat(max_tokens=24).json()["choices"][0]["parse"]["risk"] == 0.9
        target.offline = restarts
        wait_for(lambda: ready() is not restarts)
        run_model(target, other)
        target.offline = False
        (member,) = coordinator.backend.servers["target"].members
        wait_for(lambda: "runs another model than" in member.last_error)
        assert not ready()
        target.bodies.clear()
        assert served.chat(max_tokens=24).status_code == 503
        assert all(body.get("prompt_logprobs") and body["max_tokens"] == 1 for body in target.bodies), "known texts"
        run_model(target, engine.target)
        wait_for(ready)
        assert served.chat(max_tokens=24).json()["choices"][0]["parse"]["risk"] == 0.9


def test_a_server_that_is_too_busy_to_be_recognised_keeps_its_requests(engine, connect, quick_checks, monkeypatch):
    monkeypatch.setattr(target_module, "RECOGNISE_EVERY_S", 0.0)
    monkeypatch.setattr(target_module, "_RECOGNISE_LIMIT_S", 0.02)
    coordinator, (target,), _ = connect(engine)
    coordinator.generate_target(PROMPT, max_new_tokens=4)
    (member,) = coordinator.backend.servers["target"].members
    target.judge_fault = "hangs"
    target.bodies.clear()
    assert soon(coordinator, lambda: len(target.bodies) > 2)
    target.judge_fault = "500"
    target.bodies.clear()
    assert soon(coordinator, lambda: len(target.bodies) > 2)
    assert member.healthy and not member.missed
