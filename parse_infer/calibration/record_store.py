"""Records of a long measurement on disk, so that an interrupted run can resume.

`config.json` describes the measurement. `records.jsonl` has one line per record, appended as soon as it is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from parse_infer.errors import ParseError
from parse_infer.files import read_json, write_json


class Keyed(Protocol):
    """A frozen dataclass of JSON values with a key that identifies it."""

    @property
    def key(self) -> Hashable: ...


R = TypeVar("R", bound=Keyed)


class RecordStore(Generic[R]):
    """The records in a folder, and their only writer.

    Args:
        folder: created if it does not exist.
        config: describes the measurement; a folder with another config is an error.
        kind: class of the records.
        what: name of the measurement, for messages.

    Attributes:
        records: all records so far, by key.

    Raises:
        ValueError: the folder holds another measurement, or a damaged record.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], kind: type[R], what: str = "benchmark") -> None:
        self.folder = Path(folder)
        self.records: dict[Any, R] = {}
        self._kind, self._what = kind, what
        self._path = self.folder / "records.jsonl"
        config = json.loads(json.dumps(config))  # as JSON reads it back: tuples become lists
        config_path = self.folder / "config.json"
        if config_path.exists():
            self._check_same(read_json(config_path, f"choose another folder for the {what}"), config)
        elif self._path.exists():
            raise ParseError(f"{self.folder} has records.jsonl but no config.json: choose another folder")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(config_path, config)
        if self._path.exists():
            self._load()

    def append(self, record: R) -> None:
        """Append a record to the file, without fsync."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cast(Any, record)), ensure_ascii=False) + "\n")
        self.records[record.key] = record

    def _load(self) -> None:
        data = self._path.read_bytes()
        whole, newline, torn = data.rpartition(b"\n")
        if torn:  # the last run stopped in the middle of a line: measure that answer again
            os.truncate(self._path, len(whole) + len(newline))
        names = {f.name for f in fields(self._kind)}  # type: ignore[arg-type]
        for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
            try:
                row = json.loads(line)
                record = self._kind(**{key: value for key, value in row.items() if key in names})
                self.records[record.key] = record
            except (ValueError, TypeError, AttributeError) as error:
                raise ParseError(
                    f"{self._path}, line {number} is damaged ({error}): delete the line to measure that answer again"
                ) from error

    def _check_same(self, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        for key in [*current, *stored]:
            if stored.get(key) != current.get(key):
                raise ParseError(
                    f"{self.folder} holds a {self._what} with {key} {_short(stored.get(key))} and this one has "
                    f"{_short(current.get(key))}: give another folder with --out, or delete that one"
                )


def progress_bar(console: Console | None = None) -> Progress:
    """Return the bar of a measurement, with elapsed and remaining time; on standard error by default."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True))


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
