"""The recipe `validity` from beginning to end, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.models.train_problems import TRAIN_PROBLEMS
from parse_train.__main__ import main
from parse_train.judge.probe import train
from parse_train.judge.probe.model import ValidityModel
from parse_train.judge.trainer import ValidityTrainer
from tests.wandb_runs import artifacts, logged, offline_runs


@pytest.mark.slow
def test_what_is_evaluated_is_what_is_exported(training_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An adapter that is stored with less precision is scored with less precision."""
    score, scored = ValidityTrainer.score, []

    def noted(trainer, drafts):
        scored.append([p.clone() for p in trainer.model.target.parameters() if p.requires_grad])
        return score(trainer, drafts)

    monkeypatch.setattr(ValidityTrainer, "score", noted)
    recipe = str(training_folder / "recipe.yaml")
    options = ["--output_dir", str(tmp_path), "--max_steps", "2"]
    assert main([recipe, *options, "--adapter_dtype", "bfloat16"]) == 0
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert len(scored[0]) == len(exported) and any(weights.any() for weights in scored[0])
    for weights in scored[0]:
        assert torch.equal(weights, weights.bfloat16().float()), "other weights were scored than were exported"


@pytest.mark.slow
def test_the_run_lasts_until_the_promise_and_has_data_and_adapter(
    training_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One W&B run from the first step to the calibration, ended once, with artifacts that send nothing."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    while_promising = []
    monkeypatch.setattr(train, "calibrate_requests", lambda config, build: while_promising.append(tracking.runs()))
    recipe = str(training_folder / "recipe.yaml")
    options = ["--output_dir", str(tmp_path / "out"), "--max_steps", "2"]
    assert main([recipe, *options, "--report_to", "wandb"]) == 0
    assert while_promising == [True] and not tracking.runs()
    [(_, records)] = offline_runs(tmp_path / "out")
    assert [record.WhichOneof("record_type") for record in records].count("exit") == 1
    history, summary = set(logged(records, "history")), logged(records, "summary")
    assert {"train/loss", "eval/acceptance/path", "eval/reliability/path", "eval/drafts/path"} <= history
    assert {"threshold", "bound", "scale", "shift", "epochs", "steps", "eval/auroc"} <= set(summary)
    # Every figure has one name.
    figures = [name.rpartition("/")[2] for name in {*history, *summary} if "/" in name and "path" not in name]
    repeated = {name for name in figures if figures.count(name) > 1}
    assert not repeated & {"auroc", "auprc", "ece", "acceptance_rate", "false_accept_rate", "acceptance_at_risk"}
    assert not {"auroc", "eval_auroc", "test/auroc"} & {*history, *summary}
    [page] = (tmp_path / "out").glob("wandb/offline-run-*/files/media/html/eval/drafts*.html")
    assert page.read_text().count("<tr>") > 2
    provenance = json.loads((tmp_path / "out" / "adapter" / "validity_config.json").read_text())["provenance"]
    assert provenance["steps"] == 2 and 0 < provenance["epochs"] < 1 and "num_train_epochs" not in provenance
    [data], [adapter] = artifacts(records, "dataset"), artifacts(records, "model")
    assert {entry.path for entry in data.manifest.contents} == {"shard-0.jsonl", "shard-1.jsonl"}
    assert {"validity_config.json", "adapter_model.safetensors"} <= {e.path for e in adapter.manifest.contents}
    assert all(e.ref and not e.local_path for a in (data, adapter) for e in a.manifest.contents)


@pytest.mark.slow
def test_activation_checkpointing_trains_the_same_adapter(
    training_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, found = str(training_folder / "recipe.yaml"), []
    for name, options in (("plain", []), ("checkpointed", ["--activation_checkpointing", "true"])):
        assert main([recipe, "--output_dir", str(tmp_path / name), "--max_steps", "2", *options]) == 0
        found.append(load_file(tmp_path / name / "adapter" / "adapter_model.safetensors"))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-6)
    capsys.readouterr()
    assert main([recipe, "--activation_checkpointing", "true", "--probe_text", ""]) == 2
    assert "without a probe no layer has a gradient" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_probe_the_target_runs_in_the_first_epoch_only(
    training_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read, compute = [], ValidityModel.context_hidden
    monkeypatch.setattr(
        ValidityModel, "context_hidden", lambda model, ids: (read.append(len(ids)), compute(model, ids))[1]
    )
    recipe = str(training_folder / "recipe.yaml")
    options = ["--max_steps", "-1", "--num_train_epochs", "3", "--probe_text", "", "--token_dropout", "0.5"]
    options += ["--eval_strategy", "epoch", "--output_dir", str(tmp_path)]
    assert main([recipe, *options]) == 0
    config = json.loads((tmp_path / "adapter" / "validity_config.json").read_text())
    provenance = config["provenance"]
    assert config["risk"]["n_drafts"] == provenance["eval_problems"] < provenance["eval_drafts"]
    assert sum(read) == provenance["train_drafts"] + provenance["eval_drafts"]
    assert provenance["token_dropout"] == 0.5
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    # The adapter names its training problems by their prompts: 12 of 16, and none that was held out.
    learnt = (tmp_path / "adapter" / TRAIN_PROBLEMS).read_text().split()
    assert learnt == sorted(learnt) and len(learnt) == provenance["train_problems"] == 12
    assert provenance["epochs"] == 3 and provenance["steps"] > 0
    assert set(learnt) < {prompt_hash(f"Sum {n}?") for n in range(16)}


@pytest.mark.slow
def test_labels_no_better_than_chance_teach_nothing(
    training_folder: Path, build_rows: list[dict[str, Any]], tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """Training on doubtful labels and on their opposites gives the same adapter; on sure ones it does not."""
    learnt = {}
    for name, confidence, flip in (("a", 0.5, False), ("b", 0.5, True), ("sure", 1.0, True)):
        rows = []
        for number, row in enumerate(build_rows):
            labels = row["labels"]
            doubtful = number % 3 == 0  # others keep the label's gradient alive
            if doubtful and flip:
                labels = [not label for label in labels]
            rows.append(row | {"labels": labels, "confidence": [confidence if doubtful else 1.0] * len(labels)})
        data = write_jsonl(tmp_path / name / "rows.jsonl", rows)
        options = ["--data", str(data), "--output_dir", str(tmp_path / name), "--max_steps", "2"]
        assert main([str(training_folder / "recipe.yaml"), *options]) == 0
        learnt[name] = load_file(tmp_path / name / "adapter" / "validity_head.safetensors")
    for key, weight in learnt["a"].items():
        assert torch.equal(weight, learnt["b"][key]), key
    assert any(not torch.equal(weight, learnt["sure"][key]) for key, weight in learnt["a"].items())
