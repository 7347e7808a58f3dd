"""lm-eval's own tasks as far as tests name them, and one more whose problems are a local file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval.tasks import TaskManager  # noqa: E402

from data_tools.tasks.lm_eval.tasks import OWN_TASKS  # noqa: E402

FOLDERS = [
    "arc",
    "benchmarks",
    "gpqa",
    "gsm8k",
    "humaneval",
    "llama3/instruct/mmlu_cot",
    "mbpp",
    "minerva_math",
    "mmlu_pro",
]
QUESTIONS = [f"Tom has {n} apples. How many are left?" for n in range(5)]


def own_tasks(*folders: Path) -> TaskManager:
    """Some of lm-eval's tasks, read in a second (all of them: half a minute), and those in `folders`."""
    there = Path(lm_eval.__file__).parent / "tasks"
    known = [OWN_TASKS, *(there / name for name in FOLDERS)]
    return TaskManager(include_path=[*known, *folders], include_defaults=False)


def write_apples(
    folder: Path, answers: Sequence[str], stops: Sequence[str] = (), name: str = "apples", **config: Any
) -> Path:
    """A task that continues `QUESTIONS` (the first ones); right is what equals the answer."""
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers, strict=False)]
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": list(stops), "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        **config,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
    return folder


def texts(results: Any, task: str = "apples") -> list[str]:
    """What a model has answered, by lm-eval's report."""
    return [sample["resps"][0][0] for sample in results["samples"][task]]
