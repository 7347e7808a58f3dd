"""Load lm-eval's tasks and their problems, and validate them before any model is loaded."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from parse_infer.errors import ParseError
from parse_infer.files import first_sentence
from parse_infer.suggest import suggestion

# Benchmarks that lm-eval scores by log-likelihoods, with their generative variants. Both variants reason first, since
# a one-letter answer leaves nothing to draft.
GENERATIVE = {"mmlu": "mmlu_cot_llama", "gpqa": "gpqa_diamond_cot_zeroshot"}
OWN_TASKS = Path(__file__).parent / "task_files"
SEED = 1234  # of few-shot examples, as in lm-eval
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")

Files = dict[str | None, Path]
"""Local files of a task by split; None is the evaluated split."""


@dataclass(frozen=True)
class ResultRow:
    """A requested task or group of tasks.

    Attributes:
        name: the requested name.
        result: lm-eval's name in its report.
        tasks: names of its tasks.
    """

    name: str
    result: str
    tasks: list[str]


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks, each with its problems."""

    rows: list[ResultRow] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    def for_lm_eval(self) -> dict[str, Any]:
        """Input of `lm_eval.evaluator.evaluate`; reseeds, so that every call gives the same prompts."""
        _seed()
        for task in self.tasks.values():
            task.set_fewshot_seed(SEED)
        return {"tasks": self.tasks, "groups": self.groups}


def read_data(entries: Sequence[str], tasks: Sequence[str]) -> dict[str, Files]:
    """Parse `["gsm8k=a.jsonl", "gsm8k:train=b.jsonl"]` into files by task and split.

    Raises ValueError for a malformed entry or a task outside `tasks`, FileNotFoundError for a missing file.
    """
    data: dict[str, Files] = {}
    for entry in entries:
        place, equals, path = entry.partition("=")
        name, _, split = place.partition(":")
        if not equals or not name or not path:
            raise ParseError(f"--data {entry!r} is not TASK=FILE or TASK:SPLIT=FILE")
        if name not in tasks:
            raise ParseError(f"--data {entry!r}: the task is not among --tasks; {suggestion(name, tasks)}")
        if not Path(path).is_file():
            raise FileNotFoundError(f"--data {entry!r}: no file {path}; give the path of a jsonl file")
        data.setdefault(name, {})[split or None] = Path(path)
    return data


def load_tasks(
    names: Sequence[str],
    data: Mapping[str, Files] | None = None,
    *,
    num_fewshot: int | None = None,
    replaces_sampling: bool = False,
    confirm_run_unsafe_code: bool = False,
) -> Tasks:
    """Load tasks by lm-eval's names, those of `GENERATIVE`, or "mt_bench".

    Args:
        data: local files instead of the dataset on the Hugging Face Hub.
        num_fewshot: examples in each prompt; None: the task's own number. Zero-shot tasks stay zero-shot.
        replaces_sampling: the caller has a sampling of its own for all tasks; False: tasks that sample are refused.
        confirm_run_unsafe_code: lm-eval's opt-in for tasks that execute code of the models.

    Raises:
        ValueError: no task, an unknown or repeated task, or a task whose data cannot be loaded. Also a task that does
            not generate, that samples without `replaces_sampling`, or that executes code without the opt-in.
    """
    if not names:
        raise ParseError("--tasks is empty: give for example --tasks gsm8k,minerva_math")
    data, specs = data or {}, {}
    for name in dict.fromkeys(names):
        members = configs(name)
        for config in members:
            _check_answerable(name, config, replaces_sampling, confirm_run_unsafe_code)
        specs[name] = (
            _from_files(name, members, data[name], num_fewshot) if name in data else GENERATIVE.get(name, name)
        )
    datasets.disable_progress_bars()
    for noisy in ("lm_eval", "huggingface_hub"):  # hide warnings about overridden defaults and connection attempts
        logging.getLogger(noisy).setLevel(logging.ERROR)
    _seed()
    loaded = Tasks()
    for name, spec in specs.items():
        try:
            loaded_tasks = _manager().load([spec])
        except Exception as error:  # from the Hub, datasets or the task's own code
            member = configs(name)[0]
            raise ParseError(
                f"task {name!r} cannot be loaded ({first_sentence(error)}): check the connection, or give --data "
                f"{name if member['task'] == GENERATIVE.get(name, name) else member['task']}=FILE with the columns of "
                f"{member.get('dataset_path')}"
            ) from error
        for task in loaded_tasks["tasks"].values():
            task.set_config(key="num_fewshot", value=_shots(task.config.num_fewshot, num_fewshot))
            if task.task_name in loaded.tasks:
                raise ParseError(f"task {task.task_name!r}, part of {name!r}, is given twice: leave one out")
            loaded.tasks[task.task_name] = task
        group = loaded_tasks["groups"].get(GENERATIVE.get(name, name)) if name not in data else None
        if group is not None:
            loaded.groups.update(loaded_tasks["groups"])
            loaded.rows.append(ResultRow(name, group.name, list(loaded_tasks["tasks"])))
        else:
            alone = len(loaded_tasks["tasks"]) == 1  # a tag has several tasks
            loaded.rows.extend(ResultRow(name if alone else each, each, [each]) for each in loaded_tasks["tasks"])
    return loaded


def configs(name: str) -> list[dict[str, Any]]:
    """The configurations of a task's, group's or tag's tasks, without running the tasks' code.

    Raises ValueError for an unknown name.
    """
    manager, known = _manager(), GENERATIVE.get(name, name)
    if known not in manager.task_index:
        raise ParseError(f"unknown task {name!r}; {suggestion(name, manager.all_tasks)}")
    return list(_members(known))


def _members(item: object) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a group, whose members are names or inline tasks and groups."""
    index = _manager().task_index
    if isinstance(item, Mapping):
        item = item["group"] if item.get("group") in index else item.get("task", [])
    if isinstance(item, list):
        for each in item:
            yield from _members(each)
    elif (entry := index.get(item)) is not None:
        if entry.kind.name == "TAG":
            yield from _members(sorted(entry.tags))
        elif entry.kind.name == "GROUP":
            yield from _members((entry.cfg or {}).get("task", []))
        else:
            yield {"task": item, **(entry.cfg or {})}


@cache
def _manager() -> TaskManager:
    return TaskManager(include_path=OWN_TASKS)  # reads some ten thousand files


def _check_answerable(
    name: str, config: Mapping[str, Any], replaces_sampling: bool, confirm_run_unsafe_code: bool
) -> None:
    """Raise ValueError unless the command's answers suffice for the task."""
    task = config["task"]
    what = f"task {name!r}" if task == name else f"task {task!r}, part of {name!r},"
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise ParseError(
            f"{what} is scored by log-likelihoods ({kind}), which answers of two models do not have: choose a task "
            "that generates its answers, or a generative variant of this one"
        )
    generation = config.get("generation_kwargs") or {}
    temperature = float(generation.get("temperature", 1.0 if generation.get("do_sample") else 0.0))
    if not replaces_sampling and generation.get("do_sample") is not False and temperature > 0:
        raise ParseError(
            f"{what} samples its answers: give --temperature {temperature:g}, or --temperature 0 for greedy answers"
        )
    if not config.get("unsafe_code"):
        return
    if not confirm_run_unsafe_code:
        raise ParseError(f"{what} executes code of the models: use a sandbox, and give --confirm-run-unsafe-code")
    if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise ParseError(f"{what} uses Hugging Face's code_eval, which also needs HF_ALLOW_CODE_EVAL=1")


def _from_files(name: str, members: Sequence[Any], files: Files, num_fewshot: int | None) -> dict[str, Any]:
    """Input of `TaskManager.load` for a task with problems from local files.

    Raises ValueError for several tasks, or for files that do not fit the task.
    """
    config, *others = members
    if others:
        raise ParseError(f"{name!r} has several tasks: give one, such as {config['task']!r}, in --tasks and --data")
    evaluated = config.get("test_split") or config.get("validation_split")
    paths = {split or evaluated: str(path) for split, path in files.items()}
    own = [config.get(key) for key in _SPLITS]
    strange = next((split for split in paths if split not in own), None)
    if strange is not None:
        raise ParseError(
            f"--data {name}:{strange}: the task has no such split; {suggestion(strange, filter(None, own))}"
        )
    if evaluated not in paths:
        raise ParseError(f"--data gives no problems of task {name!r}: add {name}=FILE, its split {evaluated!r}")
    shots = _shots(config.get("num_fewshot"), num_fewshot)
    examples = config.get("fewshot_split") or config.get("training_split") or "train"
    if shots and examples not in paths and "samples" not in (config.get("fewshot_config") or {}):
        raise ParseError(
            f"task {name!r} needs {shots} few-shot examples from its split {examples!r}: add "
            f"--data {name}:{examples}=FILE, or give --num-fewshot 0"
        )
    absent = {key: None for key in _SPLITS if config.get(key) not in paths}
    source = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": paths}, **absent}
    # lm-eval overrides a registered task only as a member of a group.
    return {"group": f"{name} from files", "task": [{"task": config["task"], **source}]}


def _seed() -> None:
    """Seed as lm-eval does before it loads tasks, some of which shuffle choices."""
    random.seed(0)
    np.random.seed(SEED)


def _shots(own: int | None, requested: int | None) -> int:
    """Number of examples in a prompt; a task with 0 keeps 0 (as in lm-eval)."""
    return (own or 0) if requested is None or own == 0 else requested
