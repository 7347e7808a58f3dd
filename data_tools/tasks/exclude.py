"""The option `exclude` of every task: prompts to leave out, known by their hashes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from data_tools.tasks.reading import reading
from data_tools.tasks.task import Problem, Split, Task, comparison
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.files import read_jsonl
from parse_infer.models.names import resolve
from parse_infer.models.train_problems import TRAIN_PROBLEMS, read_train_problems

_HASH = re.compile("[0-9a-f]{16}")
_SPARE = 10_000  # excluded problems in a row, beyond twice the number of hashes, that end a task without end


class WithoutPrompts:
    """A task without the problems whose prompts are excluded.

    Args:
        task: the source of the problems, and their checker.
        excluded: `prompt_hash` of every prompt to leave out.

    Attributes:
        left_out: number of problems that the last call of `problems` has left out so far.
    """

    def __init__(self, task: Task, excluded: Collection[str]) -> None:
        inner = task if isinstance(task, WithoutPrompts) else None
        self.task: Task = inner.task if inner else task
        self.excluded: frozenset[str] = frozenset(excluded) | (inner.excluded if inner else frozenset())
        self.name = task.name
        self.left_out = 0

    @property
    def check_with(self) -> str | None:
        """The task's own option, if it has one."""
        return getattr(self.task, "check_with", None)

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        self.left_out = count = 0
        if not self.excluded:
            yield from self.task.problems(split, seed, limit)
            return
        source = self.task.problems(split, seed)
        while count != limit and (problem := self._next(source)) is not None:
            count += 1
            yield problem

    def _next(self, source: Iterator[Problem]) -> Problem | None:
        """Return the next problem that is not excluded, or None at the end.

        Raises ValueError where a task without end repeats excluded problems only."""
        limit = 2 * len(self.excluded) + _SPARE
        with closing(reading(source, f"reading problems of task {self.name} to leave out")) as problems:
            for n, problem in enumerate(problems):
                if prompt_hash(problem.prompt) not in self.excluded:
                    return problem
                self.left_out += 1
                if n > limit:
                    raise ParseError(
                        f"the last {n:,} problems of task {self.name} are all excluded, as training problems of a "
                        "model or by the option exclude: choose another seed, or a task with more problems"
                    )
        return None

    def check(self, problem: Problem, completion: str) -> bool | None:
        return self.task.check(problem, completion)

    def comparison(self, problem: Problem) -> Callable[[str, str], bool] | None:
        return comparison(self.task, problem)


def excluded_hashes(exclude: str | Sequence[str]) -> frozenset[str]:
    """Return the hashes that the option `exclude` names.

    Args:
        exclude: one entry or several: a hash, a file with a hash a line, a jsonl file of problems with `prompt`, or
            the folder of a model or adapter with train_problems.txt.

    Raises:
        ValueError, OSError: an entry names no hashes.
    """
    entries = [exclude] if isinstance(exclude, str) else exclude
    return frozenset[str]().union(*map(_hashes, entries))


def _hashes(entry: str) -> frozenset[str]:
    if _HASH.fullmatch(entry):
        return frozenset([entry])
    path = Path(entry).expanduser()
    if path.suffix == ".jsonl":
        return frozenset(prompt_hash(row["prompt"]) for _, row in read_jsonl(path, ("prompt",)))
    if not path.is_file():
        folder = resolve(entry)
        if not isinstance(folder, Path) or not (folder / TRAIN_PROBLEMS).is_file():
            raise FileNotFoundError(
                f"option exclude has {entry!r}, which is neither a hash, a file of hashes, a jsonl file of problems "
                f"nor a folder with {TRAIN_PROBLEMS}"
            )
        return read_train_problems(folder)
    lines = path.read_text(encoding="utf-8", errors="replace").split()
    if wrong := next((line for line in lines if not _HASH.fullmatch(line)), None):
        raise ParseError(
            f"option exclude: {path} has {wrong[:40]!r}, which is no hash of a prompt (16 hexadecimal digits); name a "
            "jsonl file to exclude its prompts"
        )
    return frozenset(lines)
