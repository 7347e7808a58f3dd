"""A training ends with a promise about requests, or says why there is none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_tools.tasks.registry import load_task
from parse_infer import tracking
from parse_infer.calibration.calibration_file import FILE, load_calibrations
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.models.names import collection_folder
from parse_infer.models.train_problems import TRAIN_PROBLEMS
from parse_train import training_run
from parse_train.judge import request_risk
from parse_train.judge.build_info import BuildInfo, read_build_info
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.request_risk import calibrate_requests
from tests.wandb_runs import logged, offline_runs

TARGET = {"name": "zoo:target"}


@pytest.fixture
def config(tmp_path: Path) -> LogprobTrainingConfig:
    shutil.copytree(collection_folder() / "adapter", tmp_path / "out" / "adapter", ignore=shutil.ignore_patterns(FILE))
    return LogprobTrainingConfig(
        data="d",
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        calibration_problems=7,
        calibration_risks=[0.4, 0.5],
    )


@pytest.mark.slow
def test_the_exported_adapter_carries_a_promise(config: LogprobTrainingConfig, tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    build = tmp_path / "build"
    build.mkdir()
    made = {"config": {"task": "gsm_symbolic", "draft": "zoo:draft", "max_draft_tokens": 200}}
    made["models"] = {"target": {"name": "zoo:target"}}
    (build / "build.json").write_text(json.dumps(made))
    info = read_build_info(str(build))
    assert (info.task, info.draft["name"], info.max_draft_tokens) == ("gsm_symbolic", "zoo:draft", 200)
    # A prompt that the adapter has learnt from comes again: it is left out. Seven make the promise void.
    prompts = [p.prompt for p in load_task("gsm_symbolic").problems("validation", limit=7)]
    learnt = tmp_path / "out" / "adapter" / TRAIN_PROBLEMS
    learnt.write_text(prompt_hash(prompts[0]) + "\n")
    config.report_to = ["wandb"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    training_run.start(config, ("zoo:target", "zoo:draft"))
    calibrate_requests(config, info)
    tracking.finish()
    out = capsys.readouterr().out
    (found,) = load_calibrations(tmp_path / "out" / "adapter" / FILE)
    assert found.n_problems == 6 and set(found.promises) == {0.4, 0.5} and found.max_new_tokens == 200
    assert "at most 50.00% of requests lost, 90% confidence: " in out
    assert found.tried[0].losses == 0 and found.tried[0].speedup > 1, "accepting nothing is lossless speculation"

    # The run has the curve of speed-up against lost requests, a point a setting, and the promises in its summary.
    [(_, records)] = offline_runs(Path(config.output_dir))
    [table] = Path(config.output_dir).glob("wandb/offline-run-*/files/media/table/*.json")
    curve = json.loads(table.read_text())
    assert curve["columns"] == ["lost", "speed-up", "block tokens", "threshold", "lost (upper bound)"]
    first, setting = found.tried[0], found.tried[0].setting
    assert curve["data"][0] == [0.0, first.speedup, setting.block_tokens, setting.threshold, first.bound]
    assert len(curve["data"]) == len(found.tried)
    assert float(logged(records, "summary")["promise/0.5/speedup"]) == found.tried[found.promises[0.5]].speedup

    learnt.write_text("".join(prompt_hash(prompt) + "\n" for prompt in prompts))
    calibrate_requests(config, info)
    assert "the adapter is not calibrated: 7 of the 7 problems are among those that the adapter" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(("label", "loss"), [({}, "lost"), ({"check_with": "own_answer"}, "disagreement")])
def test_labels_from_own_answers_are_calibrated_without_references(config, tmp_path, label, loss, capsys, monkeypatch):
    def stop(*given, loss, **named):
        raise ParseError(f"the loss is {loss}")

    monkeypatch.setattr("parse_train.judge.request_risk.CalibrationSettings", stop)
    made = {"task": "gsm_symbolic", "draft": "zoo:draft", **label}
    (tmp_path / "build.json").write_text(json.dumps({"config": made}))
    calibrate_requests(config, read_build_info(str(tmp_path)))
    assert capsys.readouterr().out == f"the adapter is not calibrated: the loss is {loss}\n"


def test_without_memory_for_it_the_training_is_finished_all_the_same(config, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(request_risk.ParseEngine, "from_pretrained", full)
    build = BuildInfo(task="gsm_symbolic", target=TARGET, draft={"name": "zoo:draft"})
    calibrate_requests(replace(config, calibration_problems=60), build)
    assert "the adapter is not calibrated: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "build", "said"),
    [
        ({"calibration_problems": 0}, BuildInfo(task="gsm_symbolic", target=TARGET, draft={"name": "zoo:draft"}), ""),
        ({}, BuildInfo(), ""),
        (
            {"calibration_problems": 3},
            BuildInfo(task="gsm_symbolic", target=TARGET, draft={"name": "zoo:draft"}),
            "takes at least 6",
        ),
        ({}, BuildInfo(task="gone", target=TARGET, draft={"name": "zoo:draft"}), "unknown task 'gone'"),
        ({}, BuildInfo(task="gsm_symbolic", target=TARGET, draft={"name": "./gone"}), "There is no folder './gone'"),
    ],
)
def test_without_one_the_training_is_finished_all_the_same(config, changes, build, said, capsys):
    calibrate_requests(replace(config, **changes), build)
    out = capsys.readouterr().out
    assert said in out if said else not out
    assert not (Path(config.output_dir) / "adapter" / FILE).exists()
