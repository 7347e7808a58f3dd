"""The target's log-probabilities of labelled drafts, as typed columns beside the rows of a build.

    logprobs/<split>-000000-000128.parquet   one row per row of data/<split>-000000-000128.jsonl, in its order
    logprobs/info.json                       number of first choices, engine, version, dtype and quantisation

Engines round differently, so read the drafts on the engine that will serve.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from data_tools.labels.backends import Writer
from data_tools.labels.rows import LabelledDraft, read_rows
from data_tools.labels.shards import parts_of, reads_of
from data_tools.tasks.reading import reading
from parse_infer.errors import ParseError
from parse_infer.files import atomic_write, read_json, write_json
from parse_infer.judge.token_logprobs import TokenLogprobs

FOLDER, INFO = "logprobs", "info.json"
_SCHEMA = pyarrow.schema(
    {
        "logprob": pyarrow.list_(pyarrow.float32()),
        "top_ids": pyarrow.list_(pyarrow.int32()),
        "top_logprobs": pyarrow.list_(pyarrow.float32()),
    }
)
"""Columns: T values, and twice T x k values, token by token."""


@dataclass(frozen=True)
class ReadDraft:
    """A labelled draft with its target tokens, and the target's log-probabilities of them."""

    row: LabelledDraft
    logprobs: TokenLogprobs


def add_logprobs(folder: Path, writer: Callable[[], Writer], k: int) -> None:
    """Read the drafts of all files of a build that have not been read. An interrupted call resumes where it stopped.

    Args:
        folder: of the build.
        writer: loads the target; called only if a file is missing.

    Raises:
        ValueError: the folder holds reads with another k.
    """
    info = folder / FOLDER / INFO
    before = read_json(info, "delete the folder") if info.is_file() else None
    if before is not None and before["k"] != k:
        raise ParseError(
            f"{info.parent} has log-probabilities with k {before['k']}, not {k}: delete the folder, or keep k"
        )
    files = sorted((folder / "data").glob("*.jsonl"))
    missing = [file for file in files if not reads_of(file).is_file()]
    for file in set(files).difference(missing):
        shutil.rmtree(parts_of(file), ignore_errors=True)  # of a call that was killed at its end
    if not missing:
        return
    target = writer()
    info.parent.mkdir(exist_ok=True)
    now = {"k": k, **target.describe_reads()}
    if before is None:
        write_json(info, now)
    elif changed := [key for key in now if before.get(key) != now[key]]:
        key = changed[0]
        raise ParseError(
            f"{info.parent} was read with {key} {before.get(key)}, not {now[key]}, and engines round differently: "
            "delete the folder to read all drafts again"
        )
    rows = sum(1 for file in missing for _ in file.open("rb"))
    for _ in reading((row for file in missing for row in _read(file, target, k)), "drafts read", rows):
        pass


def _read(file: Path, target: Writer, k: int) -> Iterator[LabelledDraft]:
    """Read the drafts of a file in parts, which are kept until the last one, and yield its rows."""
    rows, parts, tables = list(read_rows(file)) if file.stat().st_size else [], parts_of(file), [_SCHEMA.empty_table()]
    for start in range(0, len(rows), target.drafts_at_once):
        some, part = rows[start : start + target.drafts_at_once], parts / f"{start:06d}.parquet"
        if not part.is_file() or pyarrow.parquet.read_metadata(part).num_rows != len(some):
            with atomic_write(part) as beside:
                pyarrow.parquet.write_table(_table(some, target, k), beside)
        tables.append(pyarrow.parquet.read_table(part, schema=_SCHEMA))
        yield from some
    with atomic_write(reads_of(file)) as beside:
        pyarrow.parquet.write_table(pyarrow.concat_tables(tables), beside)
    shutil.rmtree(parts, ignore_errors=True)


def _table(rows: Sequence[LabelledDraft], target: Writer, k: int) -> pyarrow.Table:
    drafts = [(target.model.render(row.prompt), row.draft_ids) for row in rows]
    labelled = [i for i, (_, draft) in enumerate(drafts) if draft]
    empty = torch.empty(0)
    logprobs = [TokenLogprobs(empty, empty, empty, empty) for _ in drafts]
    for i, one in zip(labelled, target.read([drafts[i] for i in labelled], k) if labelled else (), strict=True):
        logprobs[i] = one
    columns = {
        "logprob": [one.own.numpy(force=True) for one in logprobs],
        "top_ids": [one.top_ids.flatten().numpy(force=True) for one in logprobs],
        "top_logprobs": [one.top.flatten().numpy(force=True) for one in logprobs],
    }
    return pyarrow.table(columns, schema=_SCHEMA)


def read_drafts(source: str | Path) -> Iterator[ReadDraft]:
    """Yield the drafts of a build with their log-probabilities; skip drafts without tokens.

    Raises:
        FileNotFoundError, ValueError: the build, or the log-probabilities of a file, are missing or do not match.
    """
    folder = Path(source)
    k = read_info(folder)["k"]
    for file in sorted((folder / "data").glob("*.jsonl")):
        path = reads_of(file)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: run the same `parse-data build` with --logprobs {k} again")
        if not file.stat().st_size:
            continue
        table, rows = pyarrow.parquet.read_table(path, schema=_SCHEMA), list(read_rows(file))
        if len(rows) != len(table):
            raise ParseError(f"{path} has {len(table)} rows and {file} has {len(rows)}: delete the first, and build")
        columns = (table[name].combine_chunks() for name in _SCHEMA.names)
        for row, own, top_ids, top in zip(rows, *columns, strict=True):
            ids = torch.tensor(row.draft_ids, dtype=torch.long)
            if len(own.values) != len(ids):
                raise ParseError(f"{path} does not belong to {row.where}: delete the file, and build again")
            if len(ids):
                values = (torch.tensor(part.values.to_numpy()) for part in (own, top_ids, top))
                log_probability, chosen, best = values
                logprobs = TokenLogprobs(ids, log_probability, chosen.long().reshape(-1, k), best.reshape(-1, k))
                yield ReadDraft(row, logprobs)


def read_info(folder: Path) -> dict[str, Any]:
    """Return k, engine, version, dtype and quantisation of the reads. Raise FileNotFoundError without reads."""
    path = folder / FOLDER / INFO
    if not folder.is_dir():
        raise FileNotFoundError(f"no labelled data at {folder}: there is no such folder; `parse-data build` writes it")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no log-probabilities: run `parse-data read {folder}`")
    return read_json(path, "delete the folder, and build again")
