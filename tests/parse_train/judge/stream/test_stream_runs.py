"""The recipe `stream` from beginning to end: what it measures, tracks and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parse_infer import tracking
from parse_train.__main__ import main
from parse_train.judge.stream import train
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
    [data], [first, adapter] = artifacts(records, "dataset"), artifacts(records, "model")
    assert first.name == adapter.name.replace("-stream-", "-logprob-"), "the rung below, as its own run names it"
    assert "validity_head.safetensors" in {entry.path for entry in first.manifest.contents}
    assert {"build.json", "data/train-000000-000008.jsonl"} <= {entry.path for entry in data.manifest.contents}
    assert {"validity_config.json", "adapter_model.safetensors"} <= {e.path for e in adapter.manifest.contents}
    assert all(e.ref and not e.local_path for a in (data, adapter) for e in a.manifest.contents)


@pytest.mark.slow
def test_activation_checkpointing_trains_the_same_adapter(training_folder: Path, tmp_path: Path) -> None:
    recipe, found = str(training_folder / "recipe.yaml"), []
    for name, options in (("plain", []), ("checkpointed", ["--activation_checkpointing", "true"])):
        assert main([recipe, "--output_dir", str(tmp_path / name), "--max_steps", "2", *options]) == 0
        found.append(load_file(tmp_path / name / "adapter" / "adapter_model.safetensors"))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-6)
