"""The output folder of a build: rows in jsonl shards, and a journal that says which problems are finished.

    data/<split>-00000.jsonl   one row per draft
    build.json                 the configuration and what it ran on
    .build/journal             one line per finished problem: where its rows end
    .build/lock                held while a build writes here (released by the system when the process dies)

The rows of a problem reach the disk before its journal line does. Whatever stands in a shard beyond the last journal
line belongs to a problem that was not finished, and is cut off on resume; so is a torn last line of the journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from parse_infer.models.fingerprint import same_weights

FORMAT = 1


class ShardWriter:
    """Appends the rows of finished problems to `folder`, durably and in order. A context manager.

    Args:
        folder: created if it does not exist.
        split: names the shards.
        identity: whatever decides about the rows; a folder begun with another identity is refused.
        provenance: anything else worth knowing about the build, as it is begun.
        problems_per_shard: a new file begins after this many problems.

    Attributes:
        done: the problems that are finished, in order, by the name given to `append`.

    Raises:
        ValueError: the folder belongs to another configuration, is being written to, or is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        identity: Mapping[str, Any],
        provenance: Mapping[str, Any],
        problems_per_shard: int = 1000,
    ) -> None:
        self.folder = Path(folder)
        self.split, self.problems_per_shard = split, problems_per_shard
        self.done: list[str] = []
        self._journal_path = self.folder / ".build" / "journal"
        self._shard: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        check_identity(self.folder, identity)
        (self.folder / ".build").mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / ".build" / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"another build is writing to {self.folder}: wait for it, or choose another folder"
            ) from None
        try:
            check_identity(self.folder, identity)
            content = {"format": FORMAT, "config": dict(identity), **provenance}
            if not (self.folder / "build.json").exists():
                _write_json(self.folder / "build.json", content)
            (self.folder / "data").mkdir(exist_ok=True)
            self._resume()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._shard, self._journal):
            if file is not None:
                file.close()
        self._lock.release()

    def note_models(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Write down whose rows these are: for each role what `describe_target` says.

        Raises:
            ValueError: other weights than those that the folder was begun with.
        """
        path = self.folder / "build.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        for role, before in content.get("models", {}).items():
            if role in models and not same_weights(before["fingerprint"], models[role]["fingerprint"]):
                raise ValueError(
                    f"{self.folder} was begun with other weights of the {role} model {models[role]['name']}; "
                    "choose another folder"
                )
        content["models"] = {role: dict(model) for role, model in models.items()}
        _write_json(path, content)

    def append(self, problem: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a finished problem with its rows (none, if it was skipped). On return they are on the disk."""
        number = len(self.done)
        path = self._shard_path(number // self.problems_per_shard)
        if self._shard is None or Path(self._shard.name) != path:
            if self._shard is not None:
                self._shard.close()
            self._shard = path.open("ab")
            _sync_folder(path.parent)
        self._shard.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        _sync(self._shard)
        if self._journal is None:
            self._journal = self._journal_path.open("ab")
            _sync_folder(self._journal_path.parent)
        entry = {"n": number, "problem": problem, "rows": len(rows), "shard": path.name, "end": self._shard.tell()}
        self._journal.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        _sync(self._journal)
        self.done.append(problem)

    def _shard_path(self, number: int) -> Path:
        return self.folder / "data" / f"{self.split}-{number:05d}.jsonl"

    def _resume(self) -> None:
        """Read the journal, and cut off what it does not cover."""
        ends: dict[str, int] = {}
        good = 0  # bytes of the journal
        if self._journal_path.exists():
            with self._journal_path.open("rb") as journal:
                for line in journal:
                    entry = _entry(line)
                    if entry is None:
                        if journal.read(1):
                            raise ValueError(
                                f"{self._journal_path} is damaged after problem {len(self.done)}: build anew into "
                                "another folder"
                            )
                        break
                    self.done.append(entry["problem"])
                    ends[entry["shard"]] = entry["end"]
                    good += len(line)
            os.truncate(self._journal_path, good)
        for path in sorted((self.folder / "data").iterdir()):
            if path.name not in ends:
                path.unlink()
        for name, end in ends.items():
            path = self.folder / "data" / name
            if not path.is_file() or path.stat().st_size < end:
                raise ValueError(f"{path} is shorter than when it was written: build anew into another folder")
            os.truncate(path, end)


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line of the journal; None if it is not complete."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    complete = line.endswith(b"\n") and isinstance(entry, dict) and {"problem", "shard", "end"} <= set(entry)
    return entry if complete else None


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """ValueError if `folder` holds something else than a build with this identity; an empty or missing one is fine."""
    path = folder / "build.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file: choose another one")
    if not path.exists():
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise ValueError(f"output_dir {folder} holds other files: choose a new or empty folder")
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before = content["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): choose another folder") from error
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')}, not {FORMAT}: choose another folder")
    for key, value in json.loads(json.dumps(dict(identity))).items():
        if before.get(key) != value:
            raise ValueError(
                f"{folder} was begun with {key} {before.get(key)!r}, not {value!r}; set it back, or choose another "
                "folder"
            )


def shard_rows(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All rows of a folder with jsonl files (those of a build, or any other), file by file.

    Raises:
        FileNotFoundError: no such folder, or none with a .jsonl file.
        ValueError: a line that is no row of stepwise supervision, by file and number.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the output_dir of a build")
    paths = sorted(folder.rglob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .jsonl file: give the output_dir of a build")
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not complete JSON ({error})") from error
                _check_row(row, f"{path}, line {number}")
                yield row


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    for key in ("prompt", "completions", "labels"):
        if key not in row:
            raise ValueError(f"{where}: the key {key} is missing; every row needs prompt, completions and labels")
    labels, completions = row["labels"], row["completions"]
    if not isinstance(labels, list) or not isinstance(completions, list) or len(labels) != len(completions):
        raise ValueError(f"{where}: completions and labels must be lists of the same length")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, or leave it as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
