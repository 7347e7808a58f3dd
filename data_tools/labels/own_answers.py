"""Checks against the target's own answers, for problems without references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from data_tools.tasks.checkers import answer_line, same_answer
from data_tools.tasks.task import Problem, Task, comparison


class OwnAnswers:
    """Takes the problems of a task, and checks answers against the target's own.

    Args:
        task: the source of the problems; its references are not used, and of its checks only `same_function`.
    """

    def __init__(self, task: Task) -> None:
        self.name, self.problems, self._task = task.name, task.problems, task

    def check(self, problem: Problem, completion: str) -> bool:
        same = comparison(self._task, problem) or same_answer
        return bool(problem.reference) and same(problem.reference, completion)

    def with_reference(self, problem: Problem, answers: Sequence[str]) -> Problem:
        """Return the problem with the most frequent final answer of `answers` as its reference, the first in a tie.

        Without answers the reference is empty, and every completion is wrong. So it is where no answer equals itself,
        as an answer without a function does not."""
        own = comparison(self._task, problem)
        same = own or same_answer
        votes: Counter[str] = Counter()
        for line, n in Counter(answers if own else map(answer_line, answers)).items():
            first = next((one for one in votes if same(one, line)), line)
            if first is not line or same(line, line):
                votes[first] += n
        return replace(problem, reference=max(votes, key=votes.__getitem__, default=""))
