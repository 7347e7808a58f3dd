"""The model's own answers to a task's prompts, which heads for token drafting learn from (EAGLE-3 recommends it)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, Features, List, Value, load_dataset
from rich.progress import track
from torch import Tensor

from data_tools.labels.backends import LocalWriter
from data_tools.labels.drafts import DraftSampler, render
from data_tools.labels.shards import GroupFolder, check_identity
from data_tools.tasks.registry import load_task
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel
from parse_infer.models.sampling import Sampling
from parse_train.training_config import IGNORED

_GROUP = 256  # problems answered together, so that the batch stays full, and in one file: what an interruption costs


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
    answers: str | None = field(
        default=None,
        metadata={"help": "Folder of the answers, which heads of one model can share; OUTPUT_DIR/answers by default."},
    )
    answer_temperature: float = field(default=0.0, metadata={"help": "Temperature of the answers; 0 is greedy."})
    max_answer_tokens: int = field(default=256, metadata={"help": "Longer answers are cut."})
    batch_size: int = field(default=64, metadata={"help": "Answers decoded at a time."})


def write_answers(lm: LanguageModel, config: AnswerConfig, seed: int, split: str, limit: int, folder: Path) -> None:
    """Answer the first `limit` problems of `split`, except those whose answers `folder` has.

    The processes of a distributed run share the groups; every one of them must call it. On return all are answered.

    Raises:
        ValueError: the folder holds other answers, or another run is writing there.
    """
    keys = ("model", "task", "task_options", "answer_temperature", "max_answer_tokens", "template_options")
    identity = {key: getattr(config, key) for key in keys} | {"split": split, "seed": seed, "group": _GROUP}
    check_identity(folder, identity)  # every process says so
    processes = PartialState()
    with GroupFolder(folder, split).held(identity) if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            GroupFolder(folder, split).note_models({"answering": describe_target(lm.model)})
        processes.wait_for_everyone()  # what an interrupted run left is put away
        answers = GroupFolder(folder, split)
        if not all(answers.has(group) for group in _groups(limit)):
            _answer(lm, config, seed, limit, answers, processes)
        processes.wait_for_everyone()


def _answer(
    lm: LanguageModel, config: AnswerConfig, seed: int, limit: int, answers: GroupFolder, processes: PartialState
) -> None:
    """This process's share of the groups that are missing."""
    task = load_task(config.task, **config.task_options)
    problems = list(task.problems(answers.split, seed=seed, limit=limit))  # type: ignore[arg-type]
    mine = _groups(len(problems))[processes.process_index :: processes.num_processes]
    missing = [group for group in mine if not answers.has(group)]
    writer = LocalWriter(lm, config.batch_size)
    sampler = DraftSampler(writer, lm, [Sampling(config.answer_temperature)], config.max_answer_tokens, seed)
    what = f"{lm.name} answers {answers.split} problems"
    for group in track(missing, what, disable=not processes.is_main_process):
        rows = []
        for problem, drafts in zip(asked := [problems[i] for i in group], sampler.sample(asked), strict=True):
            prompt = render(lm, problem)
            rows.append({"input_ids": prompt + (drafts[0].ids if drafts else []), "start": len(prompt)})
        answers.write(group, rows)


def _groups(n_problems: int) -> list[range]:
    return [range(start, min(start + _GROUP, n_problems)) for start in range(0, n_problems, _GROUP)]


def read_answers(folder: Path, split: str, limit: int) -> Dataset:
    """The first `limit` answers, memory-mapped: {"input_ids": prompt and answer, "start": where the answer begins}."""
    files = [str(path) for path in GroupFolder(folder, split).files]
    features = Features({"input_ids": List(Value("int32")), "start": Value("int32")})
    rows = load_dataset("json", data_files=files, split="train", features=features, cache_dir=str(folder / ".cache"))
    return rows.select(range(min(limit, len(rows))))


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


def commonest_tokens(answers: Dataset, vocab_size: int, size: int) -> list[int]:
    """The `size` tokens of a vocabulary that stand most often in answers, ascending."""
    counts = Counter(token for row in answers for token in row["input_ids"][row["start"] :])
    return sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size])
