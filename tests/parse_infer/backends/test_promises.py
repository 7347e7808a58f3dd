"""Promises over servers: calibrated there, kept there, and not those of another backend."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from data_tools.tasks.checkers import same_answer
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.calibration import settings as calibration_settings
from parse_infer.calibration.calibration_file import load_calibrations, save_calibrations
from parse_infer.calibration.measure import calibrate
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.engine import ParseEngine
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.serve.settings import RiskSettings
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.calibration.test_calibration import PROMPTS, Problem, middle_thresholds
from tests.parse_infer.serve.conftest import running

SETTINGS = CalibrationSettings(risks=(0.5, 0.9), loss="disagreement", max_new_tokens=24)


@pytest.mark.slow
def test_replayed_answers_are_the_coordinators(make_engine, connect):
    """Each request is sent once."""
    engine = make_engine(noise=0.15)
    coordinator, (target,), draft = connect(engine)
    for prompt in PROMPTS[:2]:
        thresholds = [1.1, *middle_thresholds(engine, prompt)[::3], 0.0]
        kinds = [GenerationSettings(24, t, block_tokens=n) for t in thresholds for n in ("whole", 8)]
        wanted = [coordinator.generate(prompt, settings) for settings in kinds]
        assert len({answer.text for answer in wanted}) > 2, "the settings must differ for the test to say something"
        with Replay(coordinator) as replay:
            replay.clear_caches()
            for _ in range(2):
                for settings, own in zip(kinds, wanted, strict=True):
                    answer = replay.answer(prompt, settings)
                    assert answer.token_ids == own.token_ids, settings
                    assert [(s.source, s.text) for s in answer.spans] == [(s.source, s.text) for s in own.spans]
            target.bodies.clear()
            draft.bodies.clear()
            for settings in reversed(kinds):
                replay.answer(prompt, settings)
            assert not target.bodies and not draft.bodies


def test_the_next_problem_does_not_reuse_the_prefix_cache(engine, connect):
    coordinator, (target,), _ = connect(engine)
    for n in (1, 2):
        coordinator.clear_caches()
        coordinator.generate(PROMPTS[0], max_new_tokens=8)
        assert len({body["cache_salt"] for body in target.bodies}) == n


@pytest.mark.slow
def test_a_calibration_over_servers_holds_for_servers_only(make_engine, connect, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        calibration_settings,
        "THRESHOLDS",
        (*calibration_settings.THRESHOLDS[:-1:4], calibration_settings.THRESHOLDS[-1]),
    )
    engine = make_engine(noise=0.15)
    coordinator, (_target,), _ = connect(engine)
    problems = [Problem(f"p{i}", f"{PROMPTS[i % 3]} {i}") for i in range(6)]
    coordinator.adaptive = True  # its default; but what is calibrated is what drafts lose, so each answer has one
    coordinator.controller.answering = lambda running: pytest.fail("an answer of the calibration was adaptive")
    found = calibrate(coordinator, problems, lambda p, text: None, same_answer, tmp_path, SETTINGS, task="t")
    assert found.models == coordinator.describe() and found.made["timed_problems"] == 6
    here = calibrate(engine, problems, lambda p, text: None, same_answer, tmp_path / "local", SETTINGS, task="t")
    assert found.tried[0].losses == 0, "above 1 the answer is the target's own"
    assert found.tried[-1].losses == here.tried[-1].losses > 0, "where all is kept, a greedy match changes nothing"
    path = tmp_path / "calibration.json"
    save_calibrations(path, [found])
    coordinator.adaptive = False
    coordinator.calibrations = load_calibrations(path)
    setting = found.setting(0.9).setting
    wanted = coordinator.generate(
        PROMPTS[0], max_new_tokens=24, threshold=setting.threshold, block_tokens=setting.block_tokens
    )
    assert coordinator.generate(PROMPTS[0], max_new_tokens=24, risk=0.9).token_ids == wanted.token_ids
    with pytest.raises(ValueError, match="risk and draft_text were both given"):
        coordinator.generate(PROMPTS[0], draft_text="4", max_new_tokens=24, risk=0.9)
    with running(LoopRunner(coordinator), engine, risk_settings=RiskSettings(0.9, audit=1.0)) as served:
        answer = served.chat(PROMPTS[0], max_tokens=24).json()["choices"][0]
        assert answer["message"]["content"] == wanted.text and answer["parse"]["risk"] == 0.9
    other = make_engine(noise=0.15, calibrations=[found])
    with pytest.raises(ValueError, match=r"made with another backend \(vllm\) than is loaded \(local\)"):
        other.generate(PROMPTS[0], max_new_tokens=24, risk=0.9)


def test_a_calibration_of_other_models_is_refused(engine, connect):
    coordinator, _, _ = connect(engine)
    models = {**coordinator.describe(), "draft": "another"}
    coordinator.calibrations = [Calibration("t", 1, "x", "lost", 0.9, 24, models, [], {0.1: None})]
    with pytest.raises(ValueError, match=r"made with another draft \(another\) than is loaded \(draft\)"):
        coordinator.generate(PROMPTS[0], risk=0.1)


def test_the_model_of_a_draft_server_is_compared_once_the_server_has_named_it(monkeypatch, tmp_path: Path):
    """As `calibrate` recorded it, where neither command had a --draft."""

    async def handshake(self) -> None:
        self._models["draft"] = "qwen"

    monkeypatch.setattr(ServerBackend, "handshake", handshake)
    file, settings = tmp_path / "calibration.json", GenerationSettings(24, risk=0.05)
    urls = {"target_url": "http://127.0.0.1:9", "draft_url": "http://127.0.0.1:8"}
    connect = partial(ParseEngine.from_pretrained, "zoo:target", None, "zoo:adapter", backend="vllm", **urls)
    with connect() as made:
        models = made.describe()
    tried = [TestedPoint(OperatingPoint(0.8), 0, 0.04, 2.0, 0.1)]
    found = Calibration("t", 300, "x", "lost", 0.9, 24, models, tried, {0.05: 0})
    save_calibrations(file, [found])
    with connect(calibration=file, expected=settings) as made:
        assert made.calibrations[0].models["draft"] == "qwen"
    save_calibrations(file, [replace(found, models=models | {"draft": "another"})])
    with pytest.raises(ValueError, match=r"made with another draft \(another\) than is loaded \(qwen\)"):
        connect(calibration=file, expected=settings)
    save_calibrations(file, [replace(found, models=models | {"target": "another"})])
    monkeypatch.delattr(ServerBackend, "handshake")
    with pytest.raises(ValueError, match=r"made with another target \(another\)"):
        connect(calibration=file)
