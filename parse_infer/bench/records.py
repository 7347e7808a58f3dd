"""The records of a benchmark on disk, so that an interrupted one goes on where it stopped.

`config.json` says what the folder measures; `records.jsonl` has one line per answer, written as soon as it is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from parse_infer.files import read_json, write_json

Key = tuple[str, str, int]  # problem, mode, repeat


@dataclass(frozen=True)
class Record:
    """One answer of one mode to one problem. Tokens are target tokens; None where a mode has no such thing."""

    problem_id: str
    mode: str
    repeat: int
    correct: bool | None
    """None: the task has no references."""
    seconds: float
    """Wall clock from prompt to answer, all caches empty at the start; to 0.1 ms."""
    n_tokens: int
    """Length of the answer, end token included."""
    text: str
    finish_reason: str
    target_forwards: int
    draft_forwards: int | None = None
    drafter_forwards: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    exact_tail_tokens: int | None = None
    """The part of `accepted_tokens` that was kept because it equals the target's greedy choice."""
    prefill_s: float | None = None
    """Mode "draft" only: one target forward over prompt and draft, the other half of the limit."""
    token_exact_tokens: int | None = None
    """Mode "draft" only: how many leading draft tokens equal the target's greedy choice."""

    @property
    def key(self) -> Key:
        return self.problem_id, self.mode, self.repeat


class RecordStore:
    """The records in a folder; the only place that writes them.

    Args:
        folder: made if it does not exist.
        config: what is measured. A folder with records of something else is an error, never mixed.

    Attributes:
        records: what is there already, by problem, mode and repeat.

    Raises:
        ValueError: the folder holds a benchmark with another configuration, or a damaged record.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.records: dict[Key, Record] = {}
        self._path = self.folder / "records.jsonl"
        config = json.loads(json.dumps(config))  # as it will read back: tuples become lists
        config_path = self.folder / "config.json"
        if config_path.exists():
            _check_same(self.folder, read_json(config_path, "choose another folder for the benchmark"), config)
        elif self._path.exists():
            raise ValueError(f"{self.folder} has records.jsonl but no config.json: choose another folder")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(config_path, config)
        if self._path.exists():
            self._load()

    def append(self, record: Record) -> None:
        """Add a record; it is on its way to the disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self.records[record.key] = record

    def _load(self) -> None:
        data = self._path.read_bytes()
        whole, newline, torn = data.rpartition(b"\n")
        if torn:  # the last run was cut off in the middle of a line: that answer is measured again
            os.truncate(self._path, len(whole) + len(newline))
        names = {f.name for f in fields(Record)}
        for number, line in enumerate(whole.decode("utf-8").split("\n") if newline else [], 1):
            try:
                row = json.loads(line)
                record = Record(**{key: value for key, value in row.items() if key in names})
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self._path}, line {number} is damaged ({error}): delete the line to measure that answer again"
                ) from error
            self.records[record.key] = record


def _check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{folder} holds a benchmark with {key} {_short(found.get(key))} and this one has "
                f"{_short(wanted.get(key))}: give another folder with --out, or delete that one"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
