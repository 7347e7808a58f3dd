"""`parse-data build --report_to wandb`: one run of a finished build, in the same folder and without its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from data_tools.cli import main
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import read_rows
from tests.wandb_runs import artifacts, logged, offline_runs


@pytest.mark.slow
def test_a_build_is_one_run_with_its_counts_and_rows(
    make_config: Callable[..., BuildConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    config = make_config(limit=4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({key: value for key, value in asdict(config).items() if value not in (None, [])}))
    folder = Path(config.output_dir)
    assert main(["build", str(recipe)]) == 0 and not offline_runs(folder)
    assert main(["build", str(recipe), "--report_to", "wandb"]) == 0
    [(_, records)] = offline_runs(folder)
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.job_type == "build" and "data" in run.tags
    known = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert known["target"] == config.target and known["rollouts"] == config.rollouts
    rows = sum(1 for _ in read_rows(folder))
    assert int(logged(records, "summary")["rows"]) == rows > 0
    [data] = artifacts(records, "dataset")
    assert data.name.startswith(run.run_group) and data.name.endswith("-drafts")
    names = {entry.path for entry in data.manifest.contents}
    assert "build.json" in names and not any(name.startswith("wandb") and "/" in name for name in names)
    assert all(entry.ref and not entry.local_path for entry in data.manifest.contents)
