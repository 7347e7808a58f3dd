"""Tasks by name."""

from __future__ import annotations

from typing import Any

from data_tools.tasks.gsm8k import Gsm8k
from data_tools.tasks.gsm_symbolic import GsmSymbolic
from data_tools.tasks.jsonl import Jsonl
from data_tools.tasks.task import Task
from parse_infer.suggest import suggestion

TASKS: dict[str, Any] = {"gsm_symbolic": GsmSymbolic, "gsm8k": Gsm8k, "jsonl": Jsonl}


def load_task(name: str, **options: Any) -> Task:
    """The task called `name` with `options`; a ValueError for an unknown one names the closest known one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; {suggestion(name, TASKS)}")
    known = [key for key in TASKS[name].__dataclass_fields__ if key != "name"]
    for key in options:
        if key not in known:
            raise ValueError(f"task {name} has no option {key!r}; {suggestion(key, known)}")
    return TASKS[name](**options)
