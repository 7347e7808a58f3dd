"""Problems from a user's jsonl file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from data_tools.tasks.row_task import RowTask, as_text, check_prompt, check_text
from data_tools.tasks.task import SPLITS, Problem, Split, check_split, prompt_id
from parse_infer.errors import ParseError
from parse_infer.files import read_jsonl


@dataclass
class Jsonl(RowTask):
    """Problems from a jsonl file with `prompt` (text or messages), `reference`, and optional `id` and `split`.

    Rows without `split`, or with null there, are in every split. With `check_with` none or same_function, `reference`
    is optional, and a row may have the form of MT-Bench and Spec-Bench: `turns` (the first is the prompt),
    `question_id`, `category`.

    Args:
        path: the file.
        check_with: `exact`, `numeric`, `math`, `choice`, `regex` (searches for the reference as a pattern) or `none`;
            with `run_code: true` also `tests` (the reference is Python test code) or `same_function`.
    """

    name: str = "jsonl"

    _PATH = "the jsonl file with prompts and references"

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        needed = ("prompt", "reference") if self.needs_reference else ()
        rows = []
        for place, row in read_jsonl(self.path, needed, parse_float=str):
            own = row.get("split")
            if own not in (None, *SPLITS):
                raise ParseError(f"{place}: the split is {own!r}; it must be one of {', '.join(SPLITS)}, or null")
            if own in (None, split):
                rows.append((place, row))
        for place, row in rows:
            if "prompt" not in row:
                turns = row.get("turns")
                if not isinstance(turns, list) or not turns:
                    raise ParseError(f"{place}: the row has neither prompt nor turns")
                row["prompt"] = turns[0]
            check_prompt(place, row["prompt"])
            check_text(place, row)
            self.check_reference(place, row.get("reference"))
        Random(seed).shuffle(rows)
        for _, row in rows[:limit]:
            names = (row.get("id"), row.get("question_id"), prompt_id(row["prompt"]))
            name = next(name for name in names if name not in (None, ""))
            metadata = {"category": str(row["category"])} if row.get("category") is not None else {}
            yield Problem(str(name), row["prompt"], as_text(row.get("reference")), metadata=metadata)
