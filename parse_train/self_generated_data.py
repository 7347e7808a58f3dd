"""Training data of heads and draft models: the target's own answers to a task's prompts, as EAGLE-3 recommends."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, Features, List, Value, load_dataset
from rich.progress import track
from torch import Tensor

from data_tools.labels.backends import LocalWriter
from data_tools.labels.drafts import DraftSampler, readable, render
from data_tools.labels.shards import GroupFolder, check_identity
from data_tools.tasks.registry import load_task
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.decoding.loop import run_sync
from parse_infer.errors import ParseError
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_train.training_config import IGNORED, TrackedTrainingConfig

_GROUP = 256  # problems per batch and file; an interruption loses at most one group


@dataclass
class AnswerConfig:
    """Fields that select the model, the prompts and the answers."""

    model: str = field(default="", metadata={"help": "Model to speed up: Hugging Face id, folder, or zoo:target."})
    model_dtype: str = field(
        default="auto", metadata={"help": "Dtype of the model: auto, float32, bfloat16 or float16."}
    )
    template_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Options of the chat template, for example enable_thinking: false."}
    )
    task: str = field(default="gsm_symbolic", metadata={"help": "Task whose prompts the model answers."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    n_problems: int = field(default=4000, metadata={"help": "Training problems, with one answer each."})
    n_eval_problems: int = field(default=200, metadata={"help": "Validation problems, with one answer each."})
    answers: str | None = field(
        default=None,
        metadata={"help": "Folder of the answers; heads of one model can share it. Default: OUTPUT_DIR/answers."},
    )
    answer_temperature: float = field(default=0.0, metadata={"help": "Temperature of the answers; 0 is greedy."})
    max_answer_tokens: int = field(default=256, metadata={"help": "Maximum length of an answer."})
    batch_size: int = field(default=64, metadata={"help": "Answers decoded at a time."})


@dataclass
class SelfGeneratedConfig(AnswerConfig, TrackedTrainingConfig):
    """Base configuration of trainings on the model's own answers, on top of transformers' `TrainingArguments`."""

    def __post_init__(self) -> None:
        self.label_names = ["labels"]
        super().__post_init__()
        for key in ("model", "output_dir"):
            if not getattr(self, key):
                raise ParseError(f"the recipe needs the key {key}")
        check_at_least_one(self, "n_problems", "n_eval_problems", "max_answer_tokens", "batch_size")


def check_at_least_one(config: object, *keys: str) -> None:
    """Raise ValueError for a value below 1."""
    for key in keys:
        if getattr(config, key) < 1:
            raise ParseError(f"{key} is {getattr(config, key)}; it must be at least 1")


def check_held_out(config: SelfGeneratedConfig) -> set[str]:
    """Return the `prompt_hash` of every training prompt.

    Raises ValueError if the task has no validation problems, or most of them are training problems."""
    task = load_task(config.task, **config.task_options)
    held_out = [prompt_hash(p.prompt) for p in task.problems("validation", config.seed, config.n_eval_problems)]
    if not held_out:
        raise ParseError(f"task {config.task} has no problem in its split validation")
    learnt = {prompt_hash(p.prompt) for p in task.problems("train", config.seed, config.n_problems)}
    if (n := sum(each in learnt for each in held_out)) > len(held_out) / 2:  # a generator may repeat a problem
        raise ParseError(
            f"{n} of {len(held_out)} validation problems of task {config.task} are training problems: assign each "
            "row to a split with the key split (train, validation)"
        )
    return learnt


def own_answers(lm: LanguageModel, config: SelfGeneratedConfig) -> tuple[Path, Dataset, Dataset]:
    """Let the model answer the prompts that are not answered yet; every process must call this function.

    Returns:
        The folder of the answers, and the rows of `read_answers` for training and evaluation.
    """
    folder = Path(config.answers or Path(str(config.output_dir)) / "answers")
    limits = {"train": config.n_problems, "validation": config.n_eval_problems}
    for split, limit in limits.items():
        write_answers(lm, config, config.seed, split, limit, folder / split)
    with config.main_process_first(local=False):  # other processes read the cache
        train, evaluation = (read_answers(folder / split, split, limit) for split, limit in limits.items())
    learnt = {_prompt(row) for row in train}
    unseen = [i for i, row in enumerate(evaluation) if _prompt(row) not in learnt]
    if (n := len(evaluation) - len(unseen)) and config.process_index == 0:
        print(f"note: {n} of {len(evaluation)} validation prompts are training prompts; they are left out")
    return folder, train, evaluation.select(unseen)


def _prompt(row: dict[str, Any]) -> bytes:
    """Identify the prompt of a row of `read_answers`."""
    return hashlib.sha256(repr(row["input_ids"][: row["start"]]).encode()).digest()


def write_answers(lm: LanguageModel, config: AnswerConfig, seed: int, split: str, limit: int, folder: Path) -> None:
    """Answer the first `limit` problems of `split`, except problems already answered in `folder`.

    The processes of a distributed run share the groups, so every process must call this function.

    Raises:
        ValueError: the folder holds other answers, or another run is writing to the folder.
    """
    keys = ("model", "task", "task_options", "answer_temperature", "max_answer_tokens", "template_options")
    identity = {key: getattr(config, key) for key in keys} | {"split": split, "seed": seed, "group": _GROUP}
    identity["model_dtype"] = str(lm.model.dtype).removeprefix("torch.")  # answers of another one differ
    check_identity(folder, identity)  # raises in every process
    processes = PartialState()
    main = GroupFolder(folder, split)
    with main.held(identity) if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            main.note_models({"answering": describe_target(lm.model)})
            main.write_settings()
        processes.wait_for_everyone()  # the main process has deleted leftovers of an interrupted run
        answers = GroupFolder(folder, split)
        if not all(answers.has(group) for group in _groups(limit)):
            _answer(lm, config, seed, limit, answers, processes)
        processes.wait_for_everyone()


def _answer(
    lm: LanguageModel, config: AnswerConfig, seed: int, limit: int, answers: GroupFolder, processes: PartialState
) -> None:
    """Answer this process's share of the missing groups."""
    task = load_task(config.task, **config.task_options)
    problems = list(task.problems(answers.split, seed=seed, limit=limit))  # type: ignore[arg-type]
    mine = _groups(len(problems))[processes.process_index :: processes.num_processes]
    missing = [group for group in mine if not answers.has(group)]
    writer = LocalWriter(lm, config.batch_size)
    sampler = DraftSampler(writer, lm, [Sampling(config.answer_temperature)], config.max_answer_tokens, seed)
    what = f"{lm.name} answers {answers.split} problems"
    for group in track(missing, what, disable=not processes.is_main_process):
        rows = []
        batch = readable([problems[i] for i in group], [lm], partial(print, file=sys.stderr), some=False)
        for problem, drafts in zip(batch, run_sync(sampler.sample(batch)) if batch else (), strict=True):
            prompt = render(lm, problem)
            rows.append({"input_ids": prompt + (drafts[0].ids if drafts else []), "start": len(prompt)})
        answers.write(group, rows)


def _groups(n_problems: int) -> list[range]:
    return [range(start, min(start + _GROUP, n_problems)) for start in range(0, n_problems, _GROUP)]


def read_answers(folder: Path, split: str, limit: int) -> Dataset:
    """Return `limit` memory-mapped rows: {"input_ids": prompt and answer, "start": offset of the answer}."""
    files = [str(path) for path in GroupFolder(folder, split).files]
    features = Features({"input_ids": List(Value("int32")), "start": Value("int32")})
    rows = load_dataset("json", data_files=files, split="train", features=features, cache_dir=str(folder / ".cache"))
    return rows.select(range(min(limit, len(rows))))


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return int64 input_ids [B, T], padded on the right with 0, and labels [B, T], -100 outside the answer."""
    length = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row["input_ids"])
        input_ids[i, : len(ids)] = ids
        labels[i, row["start"] : len(ids)] = ids[row["start"] :]
    return {"input_ids": input_ids, "labels": labels}


def commonest_tokens(answers: Dataset, vocab_size: int, size: int) -> list[int]:
    """Return the `size` most frequent tokens in the answers, ascending."""
    counts = Counter(token for row in answers for token in row["input_ids"][row["start"] :])
    return sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size])
