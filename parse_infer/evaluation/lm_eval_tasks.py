"""Which of lm-eval's tasks are meant, where their problems come from, and whether they can be answered at all.

What can be wrong with them is found here, before any model is loaded.
"""

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

from parse_infer.files import first_sentence
from parse_infer.suggest import suggestion

# Published benchmarks whose name means log-likelihoods in lm-eval, and its variant that generates: both reason first,
# since there is nothing to draft in an answer of one letter.
GENERATIVE = {"mmlu": "mmlu_cot_llama", "gpqa": "gpqa_diamond_cot_zeroshot"}
# lm-eval has no MT-Bench, whose answers only a judge can rate. Its first questions still tell speed and agreement.
MT_BENCH: dict[str, Any] = {
    "task": "mt_bench",
    "dataset_path": "HuggingFaceH4/mt_bench_prompts",
    "test_split": "train",
    "output_type": "generate_until",
    "doc_to_text": "{{ (turns if turns is defined else prompt)[0] }}",
    "doc_to_target": "",
    "generation_kwargs": {"until": [], "max_gen_toks": 1024, "do_sample": False},
    "metric_list": [{"metric": "bypass", "higher_is_better": True}],
    "num_fewshot": 0,
}
SEED = 1234  # of few-shot examples, as in lm-eval
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")

Files = dict[str | None, Path]
"""Local files of a task by split; None is the split that it evaluates."""


@dataclass(frozen=True)
class Row:
    """What was asked for by one name: a task, or a group of them.

    Attributes:
        name: as it was asked for.
        result: the name under which lm-eval reports it.
        tasks: names of the tasks in it.
    """

    name: str
    result: str
    tasks: list[str]


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks, each with its problems."""

    rows: list[Row] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    def for_lm_eval(self) -> dict[str, Any]:
        """As `lm_eval.evaluator.evaluate` takes them; after every call the same prompts follow."""
        _seed()
        for task in self.tasks.values():
            task.set_fewshot_seed(SEED)
        return {"tasks": self.tasks, "groups": self.groups}


def read_data(entries: Sequence[str], tasks: Sequence[str]) -> dict[str, Files]:
    """`["gsm8k=a.jsonl", "gsm8k:train=b.jsonl"]` -> files by task and split.

    Raises ValueError for an entry of another form or a task that is not among `tasks`, FileNotFoundError for no file.
    """
    data: dict[str, Files] = {}
    for entry in entries:
        place, equals, path = entry.partition("=")
        name, _, split = place.partition(":")
        if not equals or not name or not path:
            raise ValueError(f"--data {entry!r} is not TASK=FILE or TASK:SPLIT=FILE")
        if name not in tasks:
            raise ValueError(f"--data {entry!r}: the task is not among --tasks; {suggestion(name, tasks)}")
        if not Path(path).is_file():
            raise FileNotFoundError(f"--data {entry!r}: no file {path}; give the path of a jsonl file")
        data.setdefault(name, {})[split or None] = Path(path)
    return data


def load_tasks(
    names: Sequence[str],
    data: Mapping[str, Files] | None = None,
    *,
    num_fewshot: int | None = None,
    confirm_run_unsafe_code: bool = False,
) -> Tasks:
    """Load tasks by the names that lm-eval knows them by, those of `GENERATIVE`, or "mt_bench".

    Args:
        data: local files instead of the data set on the Hugging Face Hub.
        num_fewshot: examples in each prompt; None: the task's own number. Tasks that want none get none.
        confirm_run_unsafe_code: lm-eval's opt-in for tasks that run what a model has written.

    Raises:
        ValueError: no or an unknown task, one that is not generated, samples or runs code without the opt-in, one that
            is asked for twice, or one whose data cannot be loaded.
    """
    if not names:
        raise ValueError("no task is named: give for example --tasks gsm8k,minerva_math")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot is {num_fewshot}; it must be at least 0")
    catalogue, data = Catalogue(), data or {}
    specs = {}
    for name in dict.fromkeys(names):
        for config in catalogue.configs(name):
            _check_answerable(name, config, confirm_run_unsafe_code)
        specs[name] = catalogue.spec(name, data.get(name), num_fewshot)
    datasets.disable_progress_bars()
    for noisy in ("lm_eval", "huggingface_hub"):  # warnings of overridden defaults, and of every attempt to connect
        logging.getLogger(noisy).setLevel(logging.ERROR)
    _seed()
    loaded = Tasks()
    for name, spec in specs.items():
        try:
            found = catalogue.manager.load([spec])
        except Exception as error:  # of the Hub, of datasets, of a task's own code
            raise ValueError(
                f"task {name!r} cannot be loaded with {_source(name, catalogue, data)} ({first_sentence(error)})"
            ) from error
        for task in found["tasks"].values():
            shots = _shots(task.config.num_fewshot, num_fewshot)
            task.set_config(key="num_fewshot", value=shots)
            if task.task_name in loaded.tasks:
                raise ValueError(f"task {task.task_name!r}, part of {name!r}, was named already: leave one out")
            loaded.tasks[task.task_name] = task
        group = found["groups"].get(GENERATIVE.get(name, name)) if name not in data else None
        if group is not None:
            loaded.groups.update(found["groups"])
            loaded.rows.append(Row(name, group.name, list(found["tasks"])))
        else:
            alone = len(found["tasks"]) == 1  # a tag is several
            loaded.rows.extend(Row(name if alone else each, each, [each]) for each in found["tasks"])
    return loaded


class Catalogue:
    """The configurations of all tasks, as they stand in lm-eval's YAML files: none of their code has run yet."""

    def __init__(self) -> None:
        self.manager = _manager()
        self._index = self.manager.task_index

    def configs(self, name: str) -> Iterator[dict[str, Any]]:
        """Of the tasks behind a name, which may be that of a group or a tag. ValueError for an unknown one."""
        known = GENERATIVE.get(name, name)
        if name == "mt_bench":
            yield MT_BENCH
        elif known not in self._index:
            raise ValueError(f"unknown task {name!r}; {suggestion(name, ['mt_bench', *self.manager.all_tasks])}")
        else:
            yield from self._members(known)

    def spec(self, name: str, files: Files | None, num_fewshot: int | None) -> Any:
        """What lm-eval's `TaskManager.load` takes for a name. ValueError for files that do not fit the task."""
        own = name == "mt_bench"
        if files is None:
            return MT_BENCH if own else GENERATIVE.get(name, name)
        config, *others = self.configs(name)
        if others:
            raise ValueError(f"{name!r} is several tasks: name one, such as {config['task']!r}, in --tasks and --data")
        local = _from_files(name, config, files, num_fewshot)
        # A task as part of a group without a name of its own: how lm-eval overrides what is registered.
        member = {"task": config["task"], **local}
        return {**MT_BENCH, **local} if own else {"group": f"{name} from files", "task": [member]}

    def _members(self, item: Any) -> Iterator[dict[str, Any]]:
        """Groups name their members, or have tasks and further groups written into them."""
        if isinstance(item, Mapping):
            item = item["group"] if item.get("group") in self._index else item.get("task", [])
        if isinstance(item, list):
            for each in item:
                yield from self._members(each)
        elif (entry := self._index.get(item)) is not None:
            if entry.tags and item in self.manager.all_tags:
                yield from self._members(sorted(entry.tags))
            elif item in self.manager.all_groups:
                yield from self._members((entry.cfg or {}).get("task", []))
            else:
                yield {"task": item, **(entry.cfg or {})}


@cache
def _manager() -> TaskManager:
    return TaskManager()  # reads some ten thousand files


def _check_answerable(name: str, config: Mapping[str, Any], confirm_run_unsafe_code: bool) -> None:
    """ValueError unless a greedy answer is all that the task asks for."""
    task = config["task"]
    what = f"task {name!r}" if task == name else f"task {task!r}, part of {name!r},"
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise ValueError(
            f"{what} is scored by log-likelihoods ({kind}), which an answer that two models write does not have: name "
            "a task that generates its answers, or a generative variant of this one"
        )
    generation = config.get("generation_kwargs") or {}
    temperature = float(generation.get("temperature", 1.0 if generation.get("do_sample") else 0.0))
    if generation.get("do_sample") is not False and temperature > 0:
        raise ValueError(
            f"{what} samples its answers (temperature {temperature:g}), and greedy ones are compared here"
        )
    if not config.get("unsafe_code"):
        return
    if not confirm_run_unsafe_code:
        raise ValueError(f"{what} runs code that the models write: in a sandbox, give --confirm-run-unsafe-code")
    if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise ValueError(f"{what} checks code with Hugging Face's code_eval, which wants HF_ALLOW_CODE_EVAL=1 as well")


def _from_files(name: str, config: Mapping[str, Any], files: Files, num_fewshot: int | None) -> dict[str, Any]:
    """What changes in a task's configuration when its problems come from local files."""
    evaluated = config.get("test_split") or config.get("validation_split")
    paths = {split or evaluated: str(path) for split, path in files.items()}
    own = [config.get(key) for key in _SPLITS]
    strange = next((split for split in paths if split not in own), None)
    if strange is not None:
        raise ValueError(
            f"--data {name}:{strange}: the task has no such split; {suggestion(strange, filter(None, own))}"
        )
    if evaluated not in paths:
        raise ValueError(f"--data gives no problems of task {name!r}: add {name}=FILE, its split {evaluated!r}")
    shots = _shots(config.get("num_fewshot"), num_fewshot)
    examples = config.get("fewshot_split") or config.get("training_split") or "train"
    if shots and examples not in paths and "samples" not in (config.get("fewshot_config") or {}):
        raise ValueError(
            f"task {name!r} shows {shots} examples from its split {examples!r}: add --data {name}:{examples}=FILE, or "
            "give --num-fewshot 0"
        )
    absent = {key: None for key in _SPLITS if config.get(key) not in paths}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": paths}, **absent}


def _source(name: str, catalogue: Catalogue, data: Mapping[str, Files]) -> str:
    """Where the problems should come from, and the way out, for a message."""
    config, *others = catalogue.configs(name)
    columns = config.get("dataset_path")
    if name in data:
        return f"{', '.join(map(str, data[name].values()))}, which must have the columns of {columns}"
    return f"its data set {columns}: check the connection, or give --data {config['task'] if others else name}=FILE"


def _seed() -> None:
    """What lm-eval seeds before it loads tasks, some of which shuffle choices."""
    random.seed(0)
    np.random.seed(SEED)


def _shots(own: int | None, wanted: int | None) -> int:
    """Examples in a prompt; a task that says 0 means it (as in lm-eval)."""
    return (own or 0) if wanted is None or own == 0 else wanted
