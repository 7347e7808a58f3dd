"""Problems of a task. Imports `data_tools` only when a command needs problems."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from parse_infer.cli.options import read_pairs
from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from data_tools.tasks.task import Problem, Task


def open_task(name: str, task_options: Sequence[str] | None = None) -> Task:
    """Load a task of `data_tools` with KEY=VALUE options. Raises ValueError for an unknown name or a bad value."""
    from data_tools.tasks.registry import load_task

    return load_task(name, **read_pairs(task_options, "--task-option"))


def take_problems(task: Task, split: str, seed: int, limit: int) -> list[Problem]:
    """Take the first problems of a split, at most `limit`.

    Raises ValueError for an empty or unknown split.
    """
    from data_tools.tasks.task import check_split

    problems = list(islice(task.problems(check_split(split), seed=seed, limit=limit), limit))
    if not problems:
        raise ParseError(f"task {task.name} has no {split} problems")
    if len(problems) < limit:
        print(f"note: task {task.name} has only {len(problems)} {split} problems, not {limit}", file=sys.stderr)
    return problems


def describe_problems(name: str, task_options: Sequence[str] | None, split: str, seed: int) -> str:
    """Name the problems of a run, for its results."""
    return f"{' '.join([name, *(task_options or ())])}, {split} split, seed {seed}"
