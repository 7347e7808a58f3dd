"""Labelled drafts in files, read and checked row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_tools.tasks.task import prompt_id
from parse_infer.files import read_jsonl
from parse_infer.text.prompts import Message


@dataclass(frozen=True)
class LabelledDraft:
    """One checked row. `completions`, `labels`, `values`, `confidence` and `cuts` have one entry per segment.

    `draft_ids` are target tokens. `confidence` is the probability that a label is right, from 0.5 to 1; `undecided`
    counts the prefixes without label, which have no cut. `where` locates the row in error messages.
    """

    where: str
    prompt: str | Sequence[Message]
    completions: list[str]
    labels: list[bool]
    values: list[float | None]
    confidence: list[float]
    draft_ids: list[int]
    cuts: list[int]
    undecided: int = 0
    problem_id: str | None = None
    reference: str | None = None
    target_value: float | None = None
    temperature: float | None = None
    finished: bool | None = None
    draft_correct: bool | None = None
    domain: str | None = None

    @property
    def problem(self) -> str:
        """Identifier of the problem. A split never separates drafts of the same problem."""
        return self.problem_id or prompt_id(self.prompt)

    @property
    def first_error(self) -> int | None:
        """Index of the first invalid prefix, or None."""
        return self.labels.index(False) if False in self.labels else None

    @property
    def kept_by_oracle(self) -> int:
        """Draft tokens before the first invalid segment, which a perfect judge keeps with the acceptance rule
        "first_failure"."""
        n_valid = len(self.cuts) if self.first_error is None else self.first_error
        return self.cuts[n_valid - 1] if n_valid else 0

    @property
    def prompt_key(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else json.dumps([dict(m) for m in self.prompt])


def read_rows(source: str | Path) -> Iterator[LabelledDraft]:
    """Yield the rows of a .jsonl file, or of all .jsonl files in a folder.

    Raises:
        FileNotFoundError: no such source, or no .jsonl file in the folder.
        ValueError: a malformed row, named by file and line.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"the folder {source} holds no .jsonl file; `parse-data build` writes them")
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"no labelled data at {source}; `parse-data build` writes labelled data")
    for file in files:
        for where, row in read_jsonl(file):
            yield check_row(row, where)


def check_row(row: object, where: str) -> LabelledDraft:
    """Convert the row to a `LabelledDraft`; `where` locates the row in errors."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"{where}: {reason}")

    if not isinstance(row, dict):
        raise refuse(f"a row must be a JSON object, not {type(row).__name__}")
    for key in ("prompt", "completions", "labels"):
        if row.get(key) is None:
            raise refuse(f"the key {key} is missing")
    prompt, completions, labels = row["prompt"], row["completions"], row["labels"]
    if not isinstance(prompt, str | list) or not prompt:
        raise refuse("prompt must be a text or a list of chat messages")
    if isinstance(prompt, list) and not _all(prompt, dict):
        raise refuse(f"a chat message must be an object such as {{'role': …, 'content': …}}, got {prompt!r}")
    if not _all(completions, str):
        raise refuse("completions must be a list of texts, one per segment")
    if not _all(labels, bool) or len(labels) != len(completions):
        raise refuse(f"labels must be {len(completions)} booleans, one per segment, got {labels!r}")
    values = row.get("values") or [None] * len(labels)
    if not _as_many(values, labels) or not all(v is None or (_number(v) and 0 <= v <= 1) for v in values):
        raise refuse(f"values must be {len(labels)} numbers from 0 to 1, or null, got {values!r}")
    confidence = row.get("confidence") or [1.0] * len(labels)  # older data sets have no confidence
    if not _as_many(confidence, labels) or not all(_number(c) and 0.5 <= c <= 1 for c in confidence):
        raise refuse(f"confidence must be {len(labels)} numbers from 0.5 to 1, got {confidence!r}")
    ids, cuts = row.get("draft_ids"), row.get("cuts")
    if ids is None or cuts is None:
        raise refuse(
            "the row has no draft_ids or no cuts, so it is not of a build: label drafts with parse-data build"
        )
    if not _all(ids, int) or any(i < 0 for i in ids):
        raise refuse("draft_ids must be a list of token ids")
    rising = _all(cuts, int) and all(a < b for a, b in zip([0, *cuts], cuts, strict=False))
    if not rising or len(cuts) != len(labels) or (cuts and cuts[-1] != len(ids)):
        raise refuse(
            f"cuts must be {len(labels)} rising offsets that end at {len(ids)}, the draft's length, got {cuts!r}"
        )
    for key in ("temperature", "target_value"):
        if row.get(key) is not None and not _number(row[key]):
            raise refuse(f"{key} must be a number or null, got {row[key]!r}")
    return LabelledDraft(
        where,
        prompt,
        completions,
        labels,
        values,
        confidence,
        ids,
        cuts,
        undecided=row.get("undecided") or 0,
        problem_id=None if row.get("problem_id") is None else str(row["problem_id"]),
        reference=None if row.get("reference") is None else str(row["reference"]),
        target_value=row.get("target_value"),
        temperature=row.get("temperature"),
        finished=row.get("finished"),
        draft_correct=row.get("draft_correct"),
        domain=None if row.get("domain") is None else str(row["domain"]),
    )


def _as_many(values: object, labels: Sequence[object]) -> bool:
    return isinstance(values, list) and len(values) == len(labels)


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and (kind is bool or v is not True) for v in values)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
