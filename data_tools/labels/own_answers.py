"""Checks against the target's own answers, for problems without references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from data_tools.tasks.checkers import answer_line, same_answer
from data_tools.tasks.task import Problem, Task


class OwnAnswers:
    """Takes the problems of a task, and checks answers against the target's own.

    Args:
        task: the source of the problems; its references and its checker are not used.
    """

    def __init__(self, task: Task) -> None:
        self.name, self.problems = task.name, task.problems

    def check(self, problem: Problem, completion: str) -> bool:
        return bool(problem.reference) and same_answer(problem.reference, completion)

    def with_reference(self, problem: Problem, answers: Sequence[str]) -> Problem:
        """Return the problem with the most frequent final answer of `answers` as its reference, the first in a tie.

        Without answers the reference is empty, and every completion is wrong."""
        lines = Counter(map(answer_line, answers))
        votes = {one: sum(n for other, n in lines.items() if same_answer(one, other)) for one in lines}
        return replace(problem, reference=max(votes, key=votes.__getitem__, default=""))
