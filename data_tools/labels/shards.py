"""A folder with one file of rows per group of problems. The files also record which groups are finished.

    data/<split>-000128-000256.jsonl   the rows of problems 128 to 255 of the stream, complete or absent
    logprobs/<split>-000128-000256.parquet   log-probabilities of these rows, if wanted (data_tools/labels/logprobs.py)
    build.json                         the settings that affect the rows, the models and the versions
    .build/lock                        held by the running build (the system releases the lock of a dead process)
    .build/train-000128-000256.json    the rollouts of a group, with those of skipped problems (`RolloutCounts`)

build.json is written with the first finished group: settings without rows bind no later build. A resumed build repeats
an interrupted group as a whole, so that batches and rounding equal those of an uninterrupted build. A file is empty if
all its problems were skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from data_tools.labels.rollout_counts import NO_ROLLOUTS, RolloutCounts
from parse_infer.errors import ParseError
from parse_infer.files import atomic_write, read_json, read_jsonl, write_json
from parse_infer.models.fingerprint import same_weights

FORMAT = 2
_REMEDY = "choose another folder"


class GroupFolder:
    """The rows of one split. A group is a `range` of problem indices with a fixed start.

    Several processes may write different groups while one process holds the folder (`held`).

    Args:
        folder: the folder; need not exist.
        split: prefix of the file names.

    Attributes:
        ends: {start: end} of the finished groups.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self.ends = self._ends()
        self._settings: dict[str, Any] | None = None  # content of build.json, while this object holds the folder

    @property
    def n_problems(self) -> int:
        return sum(end - start for start, end in self.ends.items())

    @property
    def files(self) -> list[Path]:
        """The files of the finished groups, in order of their problems."""
        return [self._path(range(start, end)) for start, end in sorted(self.ends.items())]

    def has(self, group: range) -> bool:
        return self.ends.get(group.start, 0) >= group.stop

    def rows(self, start: int) -> list[dict[str, Any]]:
        """Return the rows of the finished group that begins at problem `start`; no rows for a missing group.

        Raises:
            ValueError: the file is damaged.
        """
        if start not in self.ends:
            return []
        path = self._path(range(start, self.ends[start]))
        try:
            return [row for _, row in read_jsonl(path)]
        except ValueError as error:
            raise ParseError(f"{error}; delete the file, and run the build again to label its problems") from error

    def write(self, group: range, rows: Sequence[Mapping[str, Any]], counts: RolloutCounts = NO_ROLLOUTS) -> None:
        """Write a finished group to disk. Log-probabilities of earlier rows are deleted."""
        self.write_settings()
        reads_of(self._path(group)).unlink(missing_ok=True)
        shutil.rmtree(parts_of(self._path(group)), ignore_errors=True)
        if counts != NO_ROLLOUTS:
            write_json(self._counts(group), asdict(counts))
        with atomic_write(self._path(group)) as beside:
            beside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        self.ends[group.start] = group.stop
        self._remove_shorter()

    @contextmanager
    def held(self, identity: Mapping[str, Any], provenance: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Lock the folder, and delete leftovers of an interrupted build. A folder without a group is left as it was.

        Args:
            identity: all settings that affect the rows.
            provenance: further facts to record in a new build.json.

        Raises:
            ValueError: the folder has a different identity, or another build is writing to the folder.
        """
        check_identity(self.folder, identity)
        (self.folder / ".build").mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / ".build" / "lock").acquire(timeout=0)
        except Timeout:
            raise ParseError(
                f"another build is writing to {self.folder}: wait until that build ends, or {_REMEDY}"
            ) from None
        with lock:
            check_identity(self.folder, identity)
            begun = any(_groups_of(self.folder))
            fresh = {"format": FORMAT, "config": dict(identity), **(provenance or {})}
            self._settings = read_json(self._settings_file, _REMEDY) if begun else fresh
            for partial in (self.folder / "data").glob(".*.partial"):
                partial.unlink()
            self.ends = self._ends()  # another process may have added groups
            self._remove_shorter()
            try:
                yield
            finally:
                self._settings = None
                if not any(_groups_of(self.folder)):
                    self._remove_traces()

    def note_models(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the result of `describe_target` for each role into the settings, which `write_settings` writes.

        Raises:
            ValueError: the folder was begun with other weights.
        """
        assert self._settings is not None, "note_models needs a held folder"
        for role, before in self._settings.get("models", {}).items():
            if role in models and not same_weights(before["fingerprint"], models[role]["fingerprint"]):
                raise ParseError(
                    f"{self.folder} was begun with other weights of the {role} model {models[role]['name']}; {_REMEDY}"
                )
        noted = {role: dict(model) for role, model in models.items()}
        self._settings |= {"models": noted, "models_loaded": time.time()}

    def write_settings(self) -> None:
        """Write build.json, if this object holds the folder and the file does not have the settings."""
        path = self._settings_file
        if self._settings is not None and not (path.is_file() and read_json(path, _REMEDY) == self._settings):
            write_json(path, self._settings)

    @property
    def _settings_file(self) -> Path:
        return self.folder / "build.json"

    def _remove_traces(self) -> None:
        self._settings_file.unlink(missing_ok=True)
        shutil.rmtree(self.folder / ".build")
        for folder in (self.folder / "data", self.folder):
            with suppress(OSError):  # absent, or not empty
                folder.rmdir()

    def _path(self, group: range) -> Path:
        return self.folder / "data" / f"{self.split}-{group.start:06d}-{group.stop:06d}.jsonl"

    def _counts(self, group: range) -> Path:
        return self.folder / ".build" / f"{self._path(group).stem}.json"

    def _ends(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for group in self._groups():
            ends[group.start] = max(group.stop, ends.get(group.start, 0))
        return ends

    def _groups(self) -> Iterator[range]:
        for path in _groups_of(self.folder):
            if match := re.fullmatch(rf"{re.escape(self.split)}-(\d+)-(\d+)", path.stem):
                yield range(int(match[1]), int(match[2]))

    def _remove_shorter(self) -> None:
        """Delete the shorter of two files with the same start, which a raised limit leaves behind."""
        for group in self._groups():
            if group.stop < self.ends.get(group.start, 0):
                self._path(group).unlink()
                for beside in (reads_of(self._path(group)), self._counts(group)):
                    beside.unlink(missing_ok=True)
                shutil.rmtree(parts_of(self._path(group)), ignore_errors=True)


def reads_of(file: Path) -> Path:
    """Return the path of the log-probabilities that belong to a file of rows."""
    return file.parent.parent / "logprobs" / f"{file.stem}.parquet"


def parts_of(file: Path) -> Path:
    """Return the folder of the log-probabilities of a file's first rows, while the others are missing."""
    return file.parent.parent / "logprobs" / f".{file.stem}.parts"


def _groups_of(folder: Path) -> Iterator[Path]:
    """Yield the files of finished groups, of all splits."""
    return (folder / "data").glob("*.jsonl")


def rollout_counts(folder: Path) -> RolloutCounts:
    """Sum the counts of the finished groups in a folder; zero for other folders."""
    files = [folder / ".build" / f"{group.stem}.json" for group in _groups_of(folder)]
    counts = [RolloutCounts(**read_json(file, "delete the file")) for file in files if file.is_file()]
    return sum(counts, NO_ROLLOUTS)


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError unless `folder` is missing, empty, without a finished group, or a build with this identity."""
    path = folder / "build.json"
    if folder.exists() and not folder.is_dir():
        raise ParseError(f"output_dir {folder} is a file: choose another one")
    if not path.exists():
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise ParseError(f"output_dir {folder} holds other files: choose a new or empty folder")
        return
    content = read_json(path, _REMEDY)
    if content.get("format") != FORMAT:
        raise ParseError(f"{path} has format {content.get('format')}, not {FORMAT}: {_REMEDY}")
    before = content.get("config")
    if not isinstance(before, dict):
        raise ParseError(f"{path} is damaged, it has no config: {_REMEDY}")
    if not any(_groups_of(folder)):  # its first build failed
        return
    now = json.loads(json.dumps(dict(identity)))
    for key in now | before:  # a key with its default value may be absent from both
        if (begun := before.get(key)) != (value := now.get(key)):
            raise ParseError(f"{folder} was begun with {key} {begun!r}, not {value!r}; set {key} back, or {_REMEDY}")
