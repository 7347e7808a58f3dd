"""Problems from a user's jsonl file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from data_tools.tasks.checkers import CHECKS, stated_number
from data_tools.tasks.task import Problem, Split, check_split, prompt_id
from parse_infer.errors import ParseError
from parse_infer.files import read_jsonl


@dataclass
class Jsonl:
    """Problems from a jsonl file with `prompt` (text or messages), `reference`, and optional `id` and `split`.

    Rows without `split` are in every split. With `check_with: none`, `reference` is optional, and a row may have the
    form of MT-Bench and Spec-Bench: `turns` (the first turn is the prompt), `question_id`, `category`.

    Args:
        path: the file.
        check_with: `exact`, `numeric`, `regex` (searches for the reference as a pattern) or `none`.
    """

    path: str = ""
    check_with: str = "numeric"
    name: str = "jsonl"

    def __post_init__(self) -> None:
        if not self.path:
            raise ParseError("task jsonl needs the option path: the jsonl file with prompts and references")
        if self.check_with not in (*CHECKS, "none"):
            raise ParseError(f"check_with is {self.check_with!r}; choose one of {', '.join(CHECKS)}, none")

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        needed = () if self.check_with == "none" else ("prompt", "reference")
        rows = [(place, row) for place, row in read_jsonl(self.path, needed) if row.get("split", split) == split]
        for place, row in rows:
            if "prompt" not in row:
                turns = row.get("turns")
                if not isinstance(turns, list) or not turns:
                    raise ParseError(f"{place}: the row has neither prompt nor turns")
                row["prompt"] = turns[0]
            _check_prompt(place, row["prompt"])
            self._check_reference(place, row.get("reference"))
        Random(seed).shuffle(rows)
        for _, row in rows[:limit]:
            names = (row.get("id"), row.get("question_id"), prompt_id(row["prompt"]))
            name = next(name for name in names if name is not None)
            metadata = {"category": str(row["category"])} if "category" in row else {}
            yield Problem(str(name), row["prompt"], str(row.get("reference", "")), metadata=metadata)

    def check(self, problem: Problem, completion: str) -> bool | None:
        if self.check_with == "none":
            return None
        return CHECKS[self.check_with](problem.reference, completion)

    def _check_reference(self, place: str, reference: object) -> None:
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


def _check_prompt(place: str, prompt: Any) -> None:
    """Raise ValueError unless the prompt is a non-empty text or list of chat messages."""
    if not prompt:
        raise ParseError(f"{place}: the prompt is empty")
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return
    if not isinstance(prompt, str):
        raise ParseError(f"{place}: the prompt must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
