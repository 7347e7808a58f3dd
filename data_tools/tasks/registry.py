"""Registry of tasks by name, and the mixture of several tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from data_tools.tasks.docstrings import Docstrings
from data_tools.tasks.exclude import WithoutPrompts, excluded_hashes
from data_tools.tasks.gsm8k import Gsm8k
from data_tools.tasks.hub_dataset import HubDataset
from data_tools.tasks.jsonl import Jsonl
from data_tools.tasks.reasoning_gym_tasks import ReasoningGym
from data_tools.tasks.task import Problem, Split, Task, comparison
from parse_infer.errors import ParseError
from parse_infer.models.names import INSTALL_ZOO
from parse_infer.suggest import suggestion


@dataclass
class Mixture:
    """Alternates between the problems of several tasks; a task without further problems drops out.

    Args:
        parts: one mapping per part: the task's name under `task`, and the options of that task. Optional are `weight`
            (a part of weight 2 gives twice as many problems as one of the default 1) and `domain` (default: the
            task's name), which each problem has in its metadata.
    """

    parts: list[dict[str, Any]] = field(default_factory=list)
    name: str = "mixture"

    def __post_init__(self) -> None:
        if not self.parts or not all(isinstance(part, dict) and "task" in part for part in self.parts):
            raise ParseError("task mixture needs the option parts: a list of mappings, each with the key task")
        for part in self.parts:
            weight, domain = part.get("weight", 1), part.get("domain", "")
            if not _fits(weight, float) or not weight > 0:
                raise ParseError(f"the weight of a part of task mixture is {weight!r}; it must be a number above 0")
            if not _fits(domain, str):
                raise ParseError(f"the domain of a part of task mixture is {domain!r}; it must be a text")
        options = [{key: value for key, value in part.items() if key not in _OWN_KEYS} for part in self.parts]
        self._tasks = [load_task(part["task"], **own) for part, own in zip(self.parts, options, strict=True)]

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        going = {number: task.problems(split, seed) for number, task in enumerate(self._tasks)}
        counts = [0] * len(self._tasks)
        while going and (limit is None or sum(counts) < limit):
            number = min(going, key=lambda i: (counts[i] + 1) / self.parts[i].get("weight", 1))
            problem = next(going[number], None)
            if problem is None:
                del going[number]
                continue
            counts[number] += 1
            part, metadata = self.parts[number], problem.metadata
            domain = part.get("domain", metadata.get("domain", part["task"]))
            metadata = {**metadata, "part": (number, *metadata.get("part", ())), "domain": domain}
            yield replace(problem, id=f"{number}-{problem.id}", metadata=metadata)

    def check(self, problem: Problem, completion: str) -> bool | None:
        task, own = self._part_of(problem)
        return task.check(own, completion)

    def comparison(self, problem: Problem) -> Callable[[str, str], bool] | None:
        return comparison(*self._part_of(problem))

    def _part_of(self, problem: Problem) -> tuple[Task, Problem]:
        """Return the task that a problem comes from, and the problem as that task knows it."""
        number, *inner = problem.metadata["part"]
        return self._tasks[number], replace(problem, metadata={**problem.metadata, "part": tuple(inner)})


TASKS: dict[str, Any] = {
    "gsm8k": Gsm8k,
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
    "dataset": HubDataset,
    "docstrings": Docstrings,
    "mixture": Mixture,
}


def load_task(name: str, **options: Any) -> Task:
    """Return the task called `name` with `options`.

    Packages add tasks through entry points of the group "parse_engine.tasks": a dataclass with the methods of `Task`.
    Every task has the option `exclude` (`excluded_hashes`): prompts to leave out.

    Raises ValueError for an unknown name (names the closest known name), an unknown option or a wrong type.
    """
    added = {point.name: point for point in entry_points(group="parse_engine.tasks")}
    if name not in TASKS and name not in added:
        if name == "gsm_symbolic":
            raise ParseError(f"the task {name} is not installed: {INSTALL_ZOO}")
        raise ParseError(f"unknown task {name!r}; {suggestion(name, [*TASKS, *added])}")
    kind = TASKS[name] if name in TASKS else added[name].load()
    types = get_type_hints(kind) | {_EXCLUDE: str | list[str]}
    known = [*(key for key in kind.__dataclass_fields__ if key != "name"), _EXCLUDE]
    for key, value in options.items():
        if key not in known:
            raise ParseError(f"task {name} has no option {key!r}; {suggestion(key, known)}")
        if not _fits(value, types[key]):
            raise ParseError(f"option {key} of task {name} is {value!r}; it must be {_in_words(types[key])}")
    excluded = excluded_hashes(options.pop(_EXCLUDE, []))
    made: Task = kind(**options)
    return WithoutPrompts(made, excluded) if excluded else made


_EXCLUDE = "exclude"
_OWN_KEYS = ("task", "weight", "domain")  # of a part of a mixture
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the type `hint`."""
    inside = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in inside)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, inside[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _in_words(hint: Any) -> str:
    inside = get_args(hint)
    if get_origin(hint) is UnionType:
        return " or ".join(map(_in_words, inside))
    if get_origin(hint) is list:
        return "a list" if inside[0] not in _WORDS else f"a list, each entry {_in_words(inside[0])}"
    return _WORDS.get(hint, "a mapping")
