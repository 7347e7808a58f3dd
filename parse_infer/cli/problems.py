"""The problems of a task, for the commands that need some: the one place where `parse_infer` reaches for `data_tools`,
and only when such a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from parse_infer.cli.options import read_pairs


def open_task(name: str, task_options: Sequence[str] | None = None) -> Any:
    """A task of `data_tools` with KEY=VALUE options; ValueError for an unknown one, or a value of another type."""
    from data_tools.tasks.registry import load_task

    return load_task(name, **read_pairs(task_options, "--task-option"))


def take_problems(task: Any, split: str, seed: int, limit: int) -> list[Any]:
    """The first problems of a split; fewer than `limit` if it has no more.

    Raises ValueError for none, or an unknown split.
    """
    from data_tools.tasks.task import check_split

    check_split(split)
    problems = list(islice(task.problems(split, seed=seed, limit=limit), limit))
    if not problems:
        raise ValueError(f"task {task.name} has no {split} problems")
    if len(problems) < limit:
        print(f"note: task {task.name} has {len(problems)} {split} problems, not {limit}", file=sys.stderr)
    return problems
