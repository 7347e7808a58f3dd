"""What Weights & Biases keeps of offline runs in a folder, read back from its files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32_768


def offline_runs(folder: Path) -> list[tuple[str, list[Any]]]:
    """Id and records (`wandb_internal_pb2.Record`) of every finished run in `folder`, in the order of their starts."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [(file.stem.removeprefix("run-"), _records(file)) for file in files]


def _records(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(200):
        records = [Record.FromString(entry) for entry in _entries(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)  # another process writes the file, and is not done when `finish` returns
    raise AssertionError(f"the run in {file} has not ended")


def _entries(content: bytes) -> Iterator[bytes]:
    """LevelDB's log behind a header of 7 bytes: blocks of chunks, each with checksum (4), length (2) and kind (1)."""
    at, entry = 7, b""
    while at + 7 <= len(content):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        entry, at = entry + content[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def logged(records: list[Any], kind: str) -> dict[str, str]:
    """The last JSON value of every key in the run's `history` or `summary`."""
    found = {}
    for record in records:
        part = getattr(record, kind)
        for item in part.item if kind == "history" else part.update:
            found["/".join(item.nested_key) or item.key] = item.value_json
    return found


def artifacts(records: list[Any], kind: str) -> list[Any]:
    """The artifacts of a type, such as "dataset"."""
    return [r.artifact for r in records if r.WhichOneof("record_type") == "artifact" and r.artifact.type == kind]
