"""Labelled drafts as they stand in files: read, checked row by row, split by problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parse_infer.models.prompts import Prompt


@dataclass(frozen=True)
class LabelledDraft:
    """One row of a build, checked. `completions`, `labels`, `values` and `cuts` have one entry per segment.

    `draft_ids` (in target tokens) and `cuts` are None for rows of a plain stepwise-supervision set, as may be the
    `temperature` that the draft was sampled at. `where` says where the row stands, for error messages.
    """

    where: str
    prompt: Prompt
    completions: list[str]
    labels: list[bool]
    values: list[float | None]
    draft_ids: list[int] | None = None
    cuts: list[int] | None = None
    problem_id: str | None = None
    temperature: float | None = None

    @property
    def problem(self) -> str:
        """What identifies the problem: drafts with the same one never stand on both sides of a split."""
        return self.problem_id or self.prompt_key

    @property
    def prompt_key(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else json.dumps([dict(m) for m in self.prompt])


def load_rows(source: str) -> list[LabelledDraft]:
    """Rows of `source`: a folder with .jsonl shards, a .jsonl file, or the Hugging Face id of a set (its train split).

    Raises:
        FileNotFoundError: nothing there, or no shard in the folder.
        ValueError: a row that is not as it should be, named by file and line.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"the folder {source} holds no .jsonl file; `parse-data build` writes them")
    elif path.is_file():
        files = [path]
    elif source.endswith(".jsonl") or source.startswith((".", "/")) or source.count("/") != 1:
        raise FileNotFoundError(f"there is no labelled data at {source}; `parse-data build` makes some")
    else:
        files = []
    rows = [check_row(row, where) for row, where in (_lines(files) if files else _hub_rows(source))]
    if not rows:
        raise ValueError(f"{source} holds no labelled draft")
    return rows


def _lines(files: Iterable[Path]) -> Iterator[tuple[Any, str]]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                try:
                    yield json.loads(line), where
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where} is not complete JSON ({error.msg})") from error


def _hub_rows(name: str) -> Iterator[tuple[Any, str]]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(name, split="train")
    except Exception as error:  # datasets raises many kinds: no such set, no network, no such split
        raise FileNotFoundError(
            f"{name} is neither a local folder or file nor a data set on the Hugging Face hub: {error}"
        ) from error
    for number, row in enumerate(dataset, start=1):
        yield row, f"{name}, row {number}"


def check_row(row: Any, where: str) -> LabelledDraft:
    """The row as a `LabelledDraft`; `where` names it in errors."""

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
    if not _all(completions, str):
        raise refuse("completions must be a list of texts, one per segment")
    if not _all(labels, bool) or len(labels) != len(completions):
        raise refuse(f"labels must be {len(completions)} times true or false, one per segment, got {labels!r}")
    values = row.get("values") or [None] * len(labels)
    if len(values) != len(labels) or not all(v is None or (_number(v) and 0 <= v <= 1) for v in values):
        raise refuse(f"values must be {len(labels)} numbers from 0 to 1, or null, got {values!r}")
    ids, cuts = row.get("draft_ids"), row.get("cuts")
    if (ids is None) != (cuts is None):
        raise refuse("draft_ids and cuts belong together; one of them is missing")
    if ids is not None and cuts is not None:
        if not _all(ids, int) or any(i < 0 for i in ids):
            raise refuse("draft_ids must be a list of token ids")
        rising = _all(cuts, int) and all(a < b for a, b in zip([0, *cuts], cuts, strict=False))
        if not rising or len(cuts) != len(labels) or (cuts and cuts[-1] != len(ids)):
            raise refuse(
                f"cuts must be {len(labels)} rising offsets that end at {len(ids)}, the draft's length, got {cuts!r}"
            )
    temperature = row.get("temperature")
    if temperature is not None and not _number(temperature):
        raise refuse(f"temperature must be a number or null, got {temperature!r}")
    problem_id = None if row.get("problem_id") is None else str(row["problem_id"])
    return LabelledDraft(where, prompt, completions, labels, values, ids, cuts, problem_id, temperature)


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and (kind is bool or v is not True) for v in values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def split_by_problem(
    rows: Sequence[LabelledDraft], eval_share: float, seed: int
) -> tuple[list[LabelledDraft], list[LabelledDraft]]:
    """Rows to learn from and rows of held-out problems. The choice depends on problem and seed, not on row order.

    Problems with different ids but the same prompt count as one.

    Raises:
        ValueError: fewer than two problems.
    """
    first_with_prompt: dict[str, str] = {}
    owner: dict[str, str] = {}

    def find(problem: str) -> str:
        while owner.setdefault(problem, problem) != problem:
            problem = owner[problem]
        return problem

    for row in rows:
        other = first_with_prompt.setdefault(row.prompt_key, row.problem)
        owner[find(row.problem)] = find(other)
    # Grouped problems may be named after any of their members; the smallest name does not depend on row order.
    names: dict[str, str] = {}
    for row in rows:
        root = find(row.problem)
        names[root] = min(names.get(root, row.problem), row.problem)
    if len(names) < 2:
        raise ValueError(f"the data holds drafts of {len(names)} problem(s); at least 2 are needed to hold one out")
    ordered = sorted(names, key=lambda root: hashlib.sha256(f"{seed}:{names[root]}".encode()).digest())
    held_out = set(ordered[: min(max(1, round(eval_share * len(ordered))), len(ordered) - 1)])
    train = [row for row in rows if find(row.problem) not in held_out]
    return train, [row for row in rows if find(row.problem) in held_out]
