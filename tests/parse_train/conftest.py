"""Labelled drafts small enough to train on in seconds, as a build would write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_tools.labels.backends import LocalWriter
from data_tools.labels.logprobs import add_logprobs
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import load_language_model
from parse_infer.text.cuts import CutPolicy


@pytest.fixture(scope="session")
def build_rows(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """48 drafts of 16 problems; a wrong step ends with "!" and spoils every prefix from there on."""
    rng, rows = Random(0), []
    for number in range(48):
        steps, ids, cuts, labels = [], [], [], []
        n_steps = rng.randint(1, 4)
        wrong = rng.randint(0, n_steps + 1)
        for k in range(n_steps):
            steps.append(f"{rng.randint(1, 9)}+{rng.randint(1, 9)}{'!' if k == wrong else '.'}\n")
            ids += tokenizer(steps[-1], add_special_tokens=False).input_ids
            cuts.append(len(ids))
            labels.append(k < wrong)
        ids.append(tokenizer.eos_token_id)
        cuts[-1] = len(ids)
        rows.append(
            {
                "prompt": f"Sum {number % 16}?",
                "completions": steps,
                "labels": labels,
                "values": [0.75 if label else None for label in labels],
                "draft_ids": ids,
                "cuts": cuts,
                "problem_id": f"p{number % 16}",
                "domain": ("even", "odd")[number % 2],
            }
        )
    return rows


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[Any]], Path]:
    def write(path: Path, rows: list[Any]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def training_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
    make_model: Callable[..., Any],
    random_adapter: Callable[..., Any],
    build_rows: list[dict[str, Any]],
    write_jsonl: Callable[[Path, list[Any]], Path],
) -> Path:
    """A folder with target/, first/ (an adapter on log-probabilities), build/ and recipe.yaml: 6 steps of 4 drafts, a
    checkpoint every 2 steps."""
    folder = tmp_path_factory.mktemp("training")
    make_model("llama_gqa").save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lm = load_language_model(folder / "target", role="target", device="cpu", dtype="float32")
    random_adapter(lm.model).save_pretrained(folder / "first")
    half = len(build_rows) // 2
    for name, rows in (("train-000000-000008", build_rows[:half]), ("train-000008-000016", build_rows[half:])):
        write_jsonl(folder / "build" / "data" / f"{name}.jsonl", rows)
    config = {"cut_policy": CutPolicy().to_dict(), "target": str(folder / "target")}
    facts = {"config": config, "models": {"target": describe_target(lm.model)}}
    (folder / "build" / "build.json").write_text(json.dumps(facts))
    add_logprobs(folder / "build", lambda: LocalWriter(lm, 5), 3)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""#!/usr/bin/env -S python -m parse_train
recipe: stream
start_from: {folder}/first
target: {folder}/target
data: {folder}/build
output_dir: {folder}/out
calibration_problems: 0
min_wrong_drafts: 1
sure_share: 0
noise: 0  # random numbers would differ between one process and two
certain_share: 0
stream_dropout: 0
lora_rank: 4
lora_alpha: 8
learning_rate: 5e-3
max_steps: 6
save_steps: 2
save_total_limit: 10
per_device_train_batch_size: 4
eval_share: 0.25
eval_strategy: "no"
logging_steps: 1
report_to: none
disable_tqdm: true
use_cpu: true
seed: 3
"""
    )
    recipe.chmod(0o755)
    return folder
