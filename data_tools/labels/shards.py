"""A folder of rows that grows by groups of problems. What is in it is also the record of what is done.

    data/<split>-000128-000256.jsonl   the rows of problems 128 to 255 of the stream, whole or not there
    build.json                         what decides about the rows, and what they were made on
    .build/lock                        held while somebody builds here (released by the system when the process dies)

A group that was interrupted is worked out again as a whole, so that its batches, and with them the rounding, are as
without the interruption. A file may be empty: all its problems were skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from parse_infer.files import atomic_write, read_json, read_jsonl, write_json
from parse_infer.models.fingerprint import same_weights

FORMAT = 2
_WAY_OUT = "choose another folder"
# How folders were begun when there was no choice.
_BEFORE = {"backend": "local", "wire": "ids", "max_rollouts": 1, "max_label_error": 0.05}


class GroupFolder:
    """The rows of one split. A group is a `range` of problem numbers; the same problem always begins it.

    Several processes may write different groups, while one of them holds the folder (`held`).

    Args:
        folder: need not exist.
        split: names the files.

    Attributes:
        ends: where the finished group that begins at a problem ends, {start: end}.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self.ends = self._ends()

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
        """The rows of the finished group that begins at problem `start`; none if it is not there.

        Raises:
            ValueError: the file is damaged.
        """
        if start not in self.ends:
            return []
        path = self._path(range(start, self.ends[start]))
        try:
            return [row for _, row in read_jsonl(path)]
        except ValueError as error:
            raise ValueError(f"{error}; delete the file, and its problems are worked out again") from error

    def write(self, group: range, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a finished group. On return its rows are on the disk."""
        with atomic_write(self._path(group)) as beside:
            beside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        self.ends[group.start] = group.stop
        self._remove_shorter()

    @contextmanager
    def held(self, identity: Mapping[str, Any], provenance: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Keep other builds out, begin the folder if it is new, and put away what an interrupted build left.

        Args:
            identity: whatever decides about the rows; a folder begun with another identity is refused.
            provenance: anything else worth knowing about the build, as it is begun.

        Raises:
            ValueError: the folder belongs to another configuration, or another build is writing to it.
        """
        check_identity(self.folder, identity)
        (self.folder / ".build").mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / ".build" / "lock").acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another build is writing to {self.folder}: wait for it, or {_WAY_OUT}") from None
        with lock:
            check_identity(self.folder, identity)
            if not (self.folder / "build.json").exists():
                write_json(
                    self.folder / "build.json", {"format": FORMAT, "config": dict(identity), **(provenance or {})}
                )
            for partial in (self.folder / "data").glob(".*.partial"):
                partial.unlink()
            self.ends = self._ends()  # others may have built here since
            self._remove_shorter()
            yield

    def note_models(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Write down whose rows these are: for each role what `describe_target` says.

        Raises:
            ValueError: other weights than those that the folder was begun with.
        """
        path = self.folder / "build.json"
        content = read_json(path, _WAY_OUT)
        for role, before in content.get("models", {}).items():
            if role in models and not same_weights(before["fingerprint"], models[role]["fingerprint"]):
                raise ValueError(
                    f"{self.folder} was begun with other weights of the {role} model {models[role]['name']}; "
                    f"{_WAY_OUT}"
                )
        write_json(path, content | {"models": {role: dict(model) for role, model in models.items()}})

    def _path(self, group: range) -> Path:
        return self.folder / "data" / f"{self.split}-{group.start:06d}-{group.stop:06d}.jsonl"

    def _ends(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for group in self._groups():
            ends[group.start] = max(group.stop, ends.get(group.start, 0))
        return ends

    def _groups(self) -> Iterator[range]:
        for path in (self.folder / "data").glob("*.jsonl"):
            if found := re.fullmatch(rf"{re.escape(self.split)}-(\d+)-(\d+)", path.stem):
                yield range(int(found[1]), int(found[2]))

    def _remove_shorter(self) -> None:
        """A limit that ended inside a group and was raised later leaves two files with the same start."""
        for group in self._groups():
            if group.stop < self.ends.get(group.start, 0):
                self._path(group).unlink()


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """ValueError if `folder` holds something else than a build with this identity; an empty or missing one is fine."""
    path = folder / "build.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file: choose another one")
    if not path.exists():
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise ValueError(f"output_dir {folder} holds other files: choose a new or empty folder")
        return
    content = read_json(path, _WAY_OUT)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')}, not {FORMAT}: {_WAY_OUT}")
    before = content.get("config")
    if not isinstance(before, dict):
        raise ValueError(f"{path} is damaged, it has no config: {_WAY_OUT}")
    for key, value in json.loads(json.dumps(dict(identity))).items():
        if (begun := before.get(key, _BEFORE.get(key))) != value:
            raise ValueError(f"{folder} was begun with {key} {begun!r}, not {value!r}; set it back, or {_WAY_OUT}")
