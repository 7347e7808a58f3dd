"""A server that runs another adapter or model than before is noticed, and judges nothing."""

from __future__ import annotations

import json
import logging

import pytest

from parse_infer.backends import health
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.engine import ParseEngine
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.serve.risk_monitor import RiskMonitor
from parse_infer.settings import GenerationSettings
from parse_infer.vllm_plugin.options import arguments, engine_options, judge_name
from parse_infer.vllm_plugin.reference import Reference
from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.backends.test_answers_over_servers import PROMPT, same
from tests.parse_infer.language_models import language_model, word_tokenizer
from tests.parse_infer.serve.conftest import running

SETTINGS = {"max_new_tokens": 24, "threshold": 0.0}
OTHER = judge_name("another")


def replace_adapter(target: FakeServer, name: str = OTHER) -> str:
    """As a rolling update does: the address and the name of the model stay. Returns the name of the adapter before."""
    own, target.names[1] = target.names[1], name
    return own


def judged(target: FakeServer) -> list[dict]:
    return [body for body in target.bodies if body.get("logprobs")]


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "parse_infer.backends" and r.levelno > logging.INFO]


def promise(coordinator: ParseEngine) -> None:
    """A calibration that promises 0.1 for a threshold of 0."""
    tried = [TestedPoint(OperatingPoint(0.0), 0.0, 0.05, 2.0, 0.05)]
    coordinator.calibration = Calibration("t", 300, "x", "accuracy", 0.9, 24, coordinator.describe(), tried, {0.1: 0})


def test_a_server_with_another_adapter_is_noticed_by_the_first_request(engine, connect, monkeypatch, caplog):
    coordinator, (target,), draft = connect(engine)
    alone = engine.generate_target(PROMPT, max_new_tokens=24).token_ids
    wanted = coordinator.generate(PROMPT, **SETTINGS)
    assert wanted.stats.accepted_tokens
    own = replace_adapter(target)
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == alone and found.fallback == "judge_replaced"
    noticed, told = warnings(caplog)
    assert noticed.startswith(f"the target server {target.url} runs another adapter than {own} (it serves target, ")
    assert told.startswith("the target answers without a draft (judge_replaced): ")
    draft.bodies.clear()
    assert coordinator.generate(PROMPT, **SETTINGS).fallback == "judge_replaced"
    assert not draft.bodies, "from now on nothing is drafted that nobody can judge"
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.02)
    coordinator.backend.run(coordinator.backend.aclose())  # the checks begin again
    replace_adapter(target, own)
    assert not coordinator.generate_target(PROMPT, max_new_tokens=8).fallback
    assert soon(coordinator, lambda: coordinator.backend.servers["target"].can_judge)
    assert same(coordinator.generate(PROMPT, **SETTINGS), wanted)


def test_drafts_go_to_the_servers_that_still_have_the_adapter(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=2)
    wanted = coordinator.generate(PROMPT, **SETTINGS)
    replace_adapter(targets[0])
    for _ in range(3):
        found = coordinator.generate([PROMPT] * 3, **SETTINGS)
        assert all(same(answer, wanted) and answer.fallback is None for answer in found)
    targets[0].bodies.clear()
    coordinator.generate([PROMPT] * 3, **SETTINGS)
    assert not judged(targets[0])
    coordinator.generate_target([PROMPT] * 4, max_new_tokens=8)
    assert targets[0].bodies, "the target is the same, and may write"


def test_an_adapter_is_compared_when_a_server_is_back_and_while_it_is_there(engine, connect, quick_checks, caplog):
    coordinator, targets, _ = connect(engine, n_targets=2)
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    first, second = coordinator.backend.servers["target"].members
    targets[0].away = True
    assert soon(coordinator, lambda: not first.healthy)
    replace_adapter(targets[0])
    targets[0].away = False
    assert soon(coordinator, lambda: first.healthy) and not first.judges and second.judges
    replace_adapter(targets[1])
    assert soon(coordinator, lambda: not second.judges) and second.healthy
    assert not any(map(judged, targets))
    assert sum("runs another adapter than" in line for line in warnings(caplog)) == 2


def test_a_server_that_was_away_at_the_start_is_examined_like_the_others(engine, connect, make_model, caplog):
    coordinator, targets, _ = connect(engine, n_targets=2)
    servers = coordinator.backend.servers["target"]
    targets[0].away = True
    coordinator.backend.run(coordinator.backend.handshake())
    assert [server.healthy for server in servers.members] == [False, True]
    words = word_tokenizer()
    own, targets[0].lm = targets[0].lm, language_model(make_model("llama", seed=15, vocab_size=300), words, "target")
    targets[0].away = False
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    assert soon(coordinator, lambda: "has other tokens than" in servers.members[0].last_error)
    assert not servers.members[0].healthy
    targets[0].lm = own
    assert soon(coordinator, lambda: servers.members[0].healthy)
    assert judged(targets[0]), "whether it can judge was tried"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda server: server.names.__setitem__(0, "other"), "serves 'other' and not"),
        (lambda server: setattr(server, "root", "/models/other"), "now serves '/models/other', before"),
        (lambda server: setattr(server.lm, "window", 8), "now has a window of 8 tokens"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_server_with_another_model_is_out(engine, connect, quick_checks, monkeypatch, change, said, role):
    coordinator, (target,), draft = connect(engine)
    coordinator.generate(PROMPT, **SETTINGS)
    server = target if role == "target" else draft
    (member,) = coordinator.backend.servers[role].members
    monkeypatch.setattr(server.lm, "window", server.lm.window)
    if role == "target":
        replace_adapter(server)
    change(server)
    assert soon(coordinator, lambda: not member.healthy)
    assert said in member.last_error


def test_a_promise_ends_with_its_adapter_and_the_answer_says_so(engine, connect, capfd):
    coordinator, (target,), _ = connect(engine)
    promise(coordinator)
    alone = engine.generate_target(PROMPT, max_new_tokens=24)
    kept = coordinator.generate(PROMPT, max_new_tokens=24, risk=0.1)
    assert kept.stats.accepted_tokens and kept.fallback is None
    with running(LoopRunner(coordinator), engine, promises=RiskMonitor(0.1, audit=1.0)) as served:
        before = served.chat(PROMPT, max_tokens=24).json()["choices"][0]
        assert before["parse"]["risk"] == 0.1 and before["parse"]["fallback"] is None
        assert served.becomes_idle(5)
        own = replace_adapter(target)
        for asked in ({}, {"parse": {"risk": 0.1}}):
            choice = served.chat(PROMPT, max_tokens=24, **asked).json()["choices"][0]
            assert choice["message"]["content"] == alone.text, "the target's own answer loses nothing"
            assert choice["parse"]["risk"] is None and choice["parse"]["fallback"] == "judge_replaced"
        metrics = served.metrics
    assert 'parse_fallbacks_total{reason="judge_replaced"} 2.0' in metrics
    assert "parse_target_servers_with_judge 0.0" in metrics and "parse_target_servers_healthy 1.0" in metrics
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    loud = [line["event"] for line in lines if line["level"] == "warning"]
    assert sum(f"runs another adapter than {own}" in event for event in loud) == 1
    assert sum("(judge_replaced)" in event for event in loud) == 2


def test_an_answer_that_was_begun_with_the_adapter_ends_without_it(engine, connect, monkeypatch):
    """The second draft of an answer finds another adapter: it is not judged, and the answer is not under a promise."""
    coordinator, (target,), draft = connect(engine)
    draft.pause = 0.02
    settings = GenerationSettings(60, 0.0, block_tokens=12)
    write, begun = FakeServer._write, []

    def replacing(self, prompt, body):
        begun.append(self)
        if len(begun) == 2:
            replace_adapter(target)
        return write(self, prompt, body)

    short = {"max_tokens": 12}
    monkeypatch.setattr(
        FakeServer, "_write", lambda self, p, b: replacing(self, p, {**b, **(short if self is draft else {})})
    )
    found = coordinator.generate(PROMPT, settings)
    assert found.fallback == "judge_replaced" and found.stats.accepted_tokens == 12
    assert found.spans[0].source == "draft" and found.spans[-1].source == "target"


def test_the_command_of_a_server_names_the_adapter(tmp_path):
    reference = Reference([1], [2], [1], [0.5])
    options = engine_options("zoo:target", "zoo:adapter", reference=reference)
    folder = options["hf_overrides"]["parse"]["adapter"]
    fingerprint = read_adapter(folder).fingerprint
    assert options["served_model_name"] == [options["model"], judge_name(fingerprint)]
    assert options["hf_overrides"]["parse"]["fingerprint"] == fingerprint, "which the server compares with the files"
    words = arguments(options)
    at = words.index("--served-model-name")
    assert words[at + 1 : at + 3] == options["served_model_name"] and words[at + 3].startswith("--")
