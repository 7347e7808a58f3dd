"""The tracker: offline with one notice where there is no key, never a prompt, never the end of a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from parse_train import tracking
from parse_train.validity.config import ValidityTrainingConfig


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ValidityTrainingConfig:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return ValidityTrainingConfig(target="t", data="d", output_dir=str(tmp_path / "out"), report_to="wandb")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes in which wandb was asked to start; it never really does."""
    wandb = pytest.importorskip("wandb")
    asked: list[str] = []
    monkeypatch.setattr(wandb, "init", lambda **options: asked.append(options["mode"]))
    return asked


def test_without_a_key_it_logs_offline_and_says_so(
    config: ValidityTrainingConfig, modes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tracking.start(config)
    assert modes == ["offline"]
    assert capsys.readouterr().out.count("wandb has no API key") == 1
    assert config.report_to == ["wandb"]


def test_a_key_is_found_where_login_puts_it(
    config: ValidityTrainingConfig, modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password not-a-key\n")
    assert tracking.has_key()
    tracking.start(config)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    tracking.start(config)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.start(config)
    assert modes == ["online", "online", "offline"]


def test_a_tracker_that_cannot_start_stops_nothing(
    config: ValidityTrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    asked: list[str] = []

    def init(**options: Any) -> None:
        asked.append(options["mode"])
        raise RuntimeError("no network")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    tracking.start(config)
    assert asked == ["online", "offline"]
    assert config.report_to == []
    assert "metrics go to the log only" in capsys.readouterr().out
    tracking.log_images({}, 0)
    tracking.finish({"auroc": 1.0})


def test_without_the_package_training_goes_on(
    config: ValidityTrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking.start(config)
    assert config.report_to == []
    assert "wandb is not installed" in capsys.readouterr().out
