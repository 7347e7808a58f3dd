"""The tracker: offline with one notice where there is no key, never a prompt, never the end of a training."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from parse_infer import tracking
from parse_infer.tracking import RunOptions
from parse_train import training_run
from parse_train.judge.logprob.config import LogprobTrainingConfig
from tests import wandb_runs
from tests.wandb_runs import offline_runs

PAIR = ("zoo:target", "/home/me/runs/draft", None)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogprobTrainingConfig:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return LogprobTrainingConfig(data="d", output_dir=str(tmp_path / "out"), report_to="wandb")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes in which wandb was asked to start; it never really does."""
    wandb = pytest.importorskip("wandb")
    asked: list[str] = []
    monkeypatch.setattr(wandb, "init", lambda **options: asked.append(options["mode"]))
    return asked


def test_without_a_key_runs_are_logged_offline_with_a_note(
    config: LogprobTrainingConfig, modes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    training_run.start(config, PAIR)
    assert modes == ["offline"]
    assert capsys.readouterr().out.count("wandb has no API key") == 1
    assert config.report_to == ["wandb"]


def test_a_resumed_training_continues_its_run(config: LogprobTrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is kept in output_dir. A training that begins anew is another run, and a user's own id is respected."""
    wandb = pytest.importorskip("wandb")
    asked: list[tuple[str | None, str]] = []
    monkeypatch.setattr(wandb, "init", lambda **options: asked.append((options["id"], options["resume"])))
    for resumed in (False, True, True, False):
        training_run.start(config, PAIR, resumed=resumed)
    ids = [id for id, _ in asked]
    assert ids[0] == ids[1] == ids[2] != ids[3] and all(ids)
    assert {resume for _, resume in asked} == {"allow"}
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    training_run.start(config, PAIR, resumed=True)
    assert asked[-1] == (None, "allow"), "wandb reads it itself"


@pytest.mark.parametrize("artifacts", ["none", "reference", "upload"])
def test_files_leave_the_machine_only_if_requested(
    config: LogprobTrainingConfig, artifacts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: what `wandb sync` would send. A reference is a name and a hash."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "my shard.jsonl").write_text("{}\n")
    (tmp_path / "rows" / ".cache").mkdir()
    (tmp_path / "rows" / ".cache" / "rows.arrow").write_text("{}\n")
    config.artifacts = artifacts
    training_run.start(config, PAIR)
    training_run.log_artifact(config, PAIR, "dataset", "my rows", tmp_path / "rows", {"rows": 1})
    training_run.log_artifact(config, PAIR, "dataset", "hub", "someone/drafts")
    training_run.log_artifact(config, PAIR, "model", "one file", tmp_path / "rows" / "my shard.jsonl")
    tracking.finish()
    [(_, records)] = offline_runs(tmp_path / "out")
    found = wandb_runs.artifacts(records, "dataset")
    if artifacts == "none":
        assert not found and not wandb_runs.artifacts(records, "model")
        return
    [model] = wandb_runs.artifacts(records, "model")
    assert [entry.path for entry in model.manifest.contents] == ["my shard.jsonl"]
    rows, hub = found
    assert re.fullmatch("zoo-target-runs-draft-[0-9a-f]{6}-my-rows", rows.name)
    assert json.loads(rows.metadata) == {"rows": 1}
    [entry] = rows.manifest.contents
    assert entry.path == "my shard.jsonl" and entry.digest and entry.size == 3
    assert bool(entry.local_path) == (artifacts == "upload") and bool(entry.ref) == (artifacts == "reference")
    [entry] = hub.manifest.contents
    assert entry.ref == "https://huggingface.co/datasets/someone/drafts", "what is on the Hub is never sent"


def test_online_runs_are_linked_by_inputs_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    seen: list[tuple[str, str]] = []

    class Online:
        offline = False

        def use_artifact(self, artifact: Any) -> None:
            seen.append(("used", artifact.name))

        def log_artifact(self, artifact: Any) -> None:
            seen.append(("logged", artifact.name))

    monkeypatch.setattr(tracking, "_run", Online)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for kind in ("dataset", "model"):
        tracking.log_artifact("reference", kind, f"own-{kind}", tmp_path)
        tracking.log_artifact("reference", kind, f"read-{kind}", tmp_path, used=True)
    assert seen == [
        ("logged", "own-dataset"),
        ("used", "read-dataset"),
        ("logged", "own-model"),
        ("used", "read-model"),
    ]


def test_a_tracker_that_fails_later_stops_nothing(
    config: LogprobTrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection lost")

    monkeypatch.setattr(tracking, "_run", Broken)
    tracking.log_images({}, 0)
    tracking.summarise({"auroc": 1.0})
    tracking.log_table("drafts", ["text"], [["1 + 1"]])
    tracking.log_curve("calibration", ("x", "y", "line"), [(1.0, 2.0, "a")])
    training_run.log_artifact(config, PAIR, "dataset", "rows", "someone/drafts")
    tracking.finish()
    assert capsys.readouterr().out.count("connection lost") == 6


def test_a_key_is_found_where_login_puts_it(
    config: LogprobTrainingConfig, modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password not-a-key\n")
    assert tracking.has_key()
    training_run.start(config, PAIR)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    training_run.start(config, PAIR)
    monkeypatch.setenv("WANDB_MODE", "offline")
    training_run.start(config, PAIR)
    assert modes == ["online", "online", "offline"]


def test_a_tracker_that_cannot_start_stops_nothing(
    config: LogprobTrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    asked: list[str] = []

    def init(**options: Any) -> None:
        asked.append(options["mode"])
        raise RuntimeError("no network")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    training_run.start(config, PAIR)
    assert asked == ["online", "offline"]
    assert config.report_to == []
    assert "metrics are only printed to the log" in capsys.readouterr().out
    tracking.log_images({}, 0)
    tracking.summarise({"auroc": 1.0})
    tracking.finish()


def test_training_runs_without_the_package(
    config: LogprobTrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    training_run.start(config, PAIR)
    assert config.report_to == []
    assert "wandb is not installed" in capsys.readouterr().out


def test_artifacts_of_two_pairs_have_two_names(tmp_path: Path) -> None:
    pairs = [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-8B", "runs/a/draft"),
        ("Qwen/Qwen3-8B", "runs/b/draft"),
        # pairs that look alike
        ("Qwen/Qwen3-8B", "runs/b-draft"),
        ("Qwen/Qwen3-8B/runs", "b/draft"),
        ("/a/models/target", "draft"),
        ("/b/models/target", "draft"),
        ("a/" + "x" * 140, "draft"),
        ("b/" + "x" * 140, "draft"),
        ("모델/하나", "draft"),
        ("모형/둘", "draft"),
    ]
    names = [RunOptions(tmp_path, "train", "logprob", pair).pair for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert names[0].startswith("Qwen-Qwen3-8B-Qwen-Qwen3-0.6B-") and names[1].startswith("Qwen-Qwen3-8B-a-draft-")
    assert all(re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) for name in names)
    assert RunOptions(tmp_path, "train", "logprob", ("zoo:target", "zoo:target", ".")).tags == [
        "logprob",
        "zoo-target",
    ]


def test_a_run_says_what_it_is(config: LogprobTrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    training_run.start(config, PAIR)
    tracking.finish()
    [(_, records)] = offline_runs(Path(str(config.output_dir)))
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.job_type == "train" and run.run_group.startswith("zoo-target-runs-draft-")
    assert set(run.tags) == {"logprob", "zoo-target", "runs-draft"}
    known = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert known["kind"] == "logprob" and known["models"] == list(PAIR[:2])
