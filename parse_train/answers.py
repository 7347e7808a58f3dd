"""The model's own answers to a task's prompts, which heads for token drafting learn from (EAGLE-3 recommends it)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset

from data_tools.drafts import DraftSampler, render
from data_tools.tasks import Problem, load_task
from parse_infer.loading import LanguageModel
from parse_infer.sampling import Sampling

IGNORED = -100
_GROUP = 64  # problems answered together; an interruption costs no more


@dataclass
class AnswerConfig:
    """Which answers, of which model."""

    model: str = field(default="", metadata={"help": "The model to guide: Hugging Face id, folder, or zoo:target."})
    model_dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    template_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Switches of the chat template, for example enable_thinking: false."}
    )
    task: str = field(default="gsm_symbolic", metadata={"help": "Task whose prompts the model answers."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    n_problems: int = field(default=4000, metadata={"help": "Training problems; one answer each."})
    n_eval_problems: int = field(default=200, metadata={"help": "Validation problems."})
    answer_temperature: float = field(default=0.0, metadata={"help": "Temperature of the answers; 0 is greedy."})
    max_answer_tokens: int = field(default=256, metadata={"help": "Longer answers are cut."})
    batch_size: int = field(default=64, metadata={"help": "Answers decoded at a time."})


class Answers(Dataset):
    """The model's own answers: {"input_ids": prompt and answer, "start": where the answer begins}."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def write_answers(lm: LanguageModel, config: AnswerConfig, seed: int, split: str, limit: int, path: Path) -> Answers:
    """Answers to `limit` problems of `split`, from the file at `path` as far as it has them, which then has them all.

    Every line is one answer; a line cut off by an interruption is dropped.

    Raises:
        ValueError: the file holds answers of another model or task.
    """
    settings = [lm.name, config.task, config.task_options, seed, config.answer_temperature]
    settings += [config.max_answer_tokens, config.template_options]
    identity = json.loads(json.dumps({"answers": settings}))
    rows: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines or lines[0] != identity:
            raise ValueError(f"{path} holds answers of another model, task or seed: choose another output_dir")
        rows = lines[1:]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in [identity, *rows])
        problems: list[Problem] = list(
            load_task(config.task, **config.task_options).problems(split, seed=seed, limit=limit)  # type: ignore[arg-type]
        )
        sampler = DraftSampler(
            lm, lm, [Sampling(config.answer_temperature)], config.max_answer_tokens, seed, config.batch_size
        )
        groups = range(len(rows), len(problems), _GROUP)
        for first in track(groups, f"{lm.name} answers {split} problems", disable=not groups):
            group = problems[first : first + _GROUP]
            for problem, drafts in zip(group, sampler.sample(group), strict=True):
                prompt = render(lm, problem)
                row = {"input_ids": prompt + (drafts[0].ids if drafts else []), "start": len(prompt)}
                rows.append(row)
                file.write(json.dumps(row) + "\n")
            file.flush()
    return Answers(rows[:limit])


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """input_ids [B, T] padded on the right with 0, labels [B, T]: the token at answer places, else -100; int64."""
    length = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row["input_ids"])
        input_ids[i, : len(ids)] = ids
        labels[i, row["start"] : len(ids)] = ids[row["start"] :]
    return {"input_ids": input_ids, "labels": labels}


def commonest_tokens(answers: Answers, vocab_size: int, size: int) -> list[int]:
    """The `size` tokens of a vocabulary that stand most often in answers, ascending."""
    counts = Counter(token for row in answers.rows for token in row["input_ids"][row["start"] :])
    return sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size])
