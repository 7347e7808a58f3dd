"""Base of tasks whose problems are rows with a prompt and a reference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_tools.tasks.checkers import CHECKS
from data_tools.tasks.code.checks import CODE_CHECKS, error_in_tests, same_function
from data_tools.tasks.code.sandbox import require_sandbox
from data_tools.tasks.expressions import require_math_verify
from data_tools.tasks.stated_numbers import stated_number
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError


@dataclass
class RowTask:
    """Checks answers by a check of `CHECKS` or `CODE_CHECKS`, and the rows before.

    Args:
        run_code: allow the checks of `CODE_CHECKS`, which run code that models write.
    """

    path: str = ""
    check_with: str = "numeric"
    run_code: bool = False
    name: str = "rows"

    _PATH = "where the rows are"

    def __post_init__(self) -> None:
        if not self.path:
            raise ParseError(f"task {self.name} needs the option path: {self._PATH}")
        known = [*CHECKS, *CODE_CHECKS, "none"]
        if self.check_with not in known:
            raise ParseError(f"check_with is {self.check_with!r}; choose one of {', '.join(known)}")
        if self.check_with == "math":
            require_math_verify()
        if self.check_with in CODE_CHECKS:
            if not self.run_code:
                raise ParseError(
                    f"check_with {self.check_with} runs code that the models write: to allow that, in a sandbox, set "
                    f"the option run_code of task {self.name} to true"
                )
            require_sandbox()

    def check(self, problem: Problem, completion: str) -> bool | None:
        if self.check_with == "none" or not (problem.reference or self.needs_reference):
            return None
        if self.check_with in CODE_CHECKS:
            return CODE_CHECKS[self.check_with](_text(problem.prompt), problem.reference, completion)
        return CHECKS[self.check_with](problem.reference, completion)

    def comparison(self, problem: Problem) -> Callable[[str, str], bool] | None:
        """Return the function that compares two answers to the problem; None: `same_answer` does."""
        return partial(same_function, _text(problem.prompt)) if self.check_with == "same_function" else None

    @property
    def needs_reference(self) -> bool:
        return self.check_with not in ("none", "same_function")

    def check_reference(self, place: str, reference: object) -> None:
        """Raise ValueError for a reference that no answer, or every one, can match."""
        if self.needs_reference and reference in (None, ""):
            raise ParseError(f"{place}: the reference is empty; to use prompts alone, set check_with: none")
        if self.check_with == "regex":
            try:
                re.compile(str(reference))
            except re.error as error:
                raise ParseError(f"{place}: the reference is not a valid pattern ({error})") from error
        if self.check_with == "numeric" and stated_number(str(reference)) is None:
            raise ParseError(
                f"{place}: the reference {reference!r} has no number, or not a single one; to compare texts, set "
                "check_with: exact, and for mathematics math"
            )
        if self.check_with == "tests" and (wrong := error_in_tests(str(reference))):
            raise ParseError(f"{place}: the reference {str(reference)[:40]!r} {wrong}")
        if self.check_with == "choice" and not re.fullmatch("[A-Ja-j]", str(reference).strip()):
            raise ParseError(f"{place}: the reference {reference!r} is no letter from A to J, as choice needs")


def as_text(value: object) -> str:
    """Return the text of a reference; true and false as in JSON."""
    return "" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _text(prompt: str | list[dict[str, str]]) -> str:
    content: Any = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content or ())


def check_text(place: str, value: object) -> None:
    """Raise ValueError if a text in a row's value has half of a surrogate pair, which no file in UTF-8 can hold."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.end].strip('"')
        raise ParseError(f"{place}: the text {around!a} ends in half of a character: repair or drop the row") from None


def check_prompt(place: str, prompt: object) -> None:
    """Raise ValueError unless the prompt is a non-empty text or list of chat messages."""
    if not prompt:
        raise ParseError(f"{place}: the prompt is empty")
    check_text(place, prompt)
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return
    if not isinstance(prompt, str):
        raise ParseError(f"{place}: the prompt must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
