"""Base of tasks whose problems are rows with a prompt and a reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from data_tools.tasks.checkers import CHECKS, same_expression, stated_number
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError


@dataclass
class RowTask:
    """Checks answers by a check of `CHECKS`, and the rows before."""

    path: str = ""
    check_with: str = "numeric"
    name: str = "rows"

    _PATH = "where the rows are"

    def __post_init__(self) -> None:
        if not self.path:
            raise ParseError(f"task {self.name} needs the option path: {self._PATH}")
        if self.check_with not in (*CHECKS, "none"):
            raise ParseError(f"check_with is {self.check_with!r}; choose one of {', '.join(CHECKS)}, none")
        if self.check_with == "math":
            same_expression("1", "1")  # raises without its package, before any work

    def check(self, problem: Problem, completion: str) -> bool | None:
        if self.check_with == "none":
            return None
        return CHECKS[self.check_with](problem.reference, completion)

    def check_reference(self, place: str, reference: object) -> None:
        """Raise ValueError for a reference that no answer can match."""
        if self.check_with == "regex":
            try:
                re.compile(str(reference))
            except re.error as error:
                raise ParseError(f"{place}: the reference is not a valid pattern ({error})") from error
        if self.check_with == "numeric" and stated_number(str(reference)) is None:
            raise ParseError(
                f"{place}: the reference {reference!r} has no number; to compare texts, set check_with: exact"
            )
        if self.check_with == "choice" and not re.fullmatch("[A-Ja-j]", str(reference).strip()):
            raise ParseError(f"{place}: the reference {reference!r} is no letter from A to J, as choice needs")


def check_prompt(place: str, prompt: Any) -> None:
    """Raise ValueError unless the prompt is a non-empty text or list of chat messages."""
    if not prompt:
        raise ParseError(f"{place}: the prompt is empty")
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return
    if not isinstance(prompt, str):
        raise ParseError(f"{place}: the prompt must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
