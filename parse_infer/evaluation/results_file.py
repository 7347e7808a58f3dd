"""`results.json`: the figures of a benchmark and their records, without texts.

Records are stored in columns, `{"problems": [id, …], "repeats": R, "modes": {mode: {field: [value, …]}}}`: all
problems of the first repeat, then of the next. A sweep has only the first problems. Empty columns are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from parse_infer.errors import ParseError
from parse_infer.evaluation.records import Record
from parse_infer.files import read_json, write_text

Results = dict[str, Any]
_FIELDS = [f.name for f in fields(Record) if f.name not in ("problem_id", "mode", "repeat", "text")]


def to_columns(records: Sequence[Record], problem_ids: Sequence[str]) -> dict[str, Any]:
    """Convert complete records to columns; each mode must have all repeats of its problems."""
    place = {problem: i for i, problem in enumerate(problem_ids)}
    modes: dict[str, list[Record]] = {}
    for record in sorted((r for r in records if r.problem_id in place), key=lambda r: (r.repeat, place[r.problem_id])):
        modes.setdefault(record.mode, []).append(record)
    columns: dict[str, dict[str, list[Any]]] = {}
    for mode, rows in modes.items():
        values = {name: [getattr(row, name) for row in rows] for name in _FIELDS}
        columns[mode] = {name: column for name, column in values.items() if column != [None] * len(rows)}
        columns[mode]["correct"] = [int(right) for right in values["correct"]]
    repeats = 1 + max((record.repeat for record in records), default=0)
    return {"problems": list(problem_ids), "repeats": repeats, "modes": columns}


def from_columns(columns: dict[str, Any]) -> Iterator[Record]:
    """Convert columns to records with empty texts."""
    for mode, values in columns["modes"].items():
        n = len(values["correct"]) // columns["repeats"]
        for i, right in enumerate(values["correct"]):
            row = {name: column[i] for name, column in values.items()}
            own = {"problem_id": columns["problems"][i % n], "mode": mode, "repeat": i // n, "text": ""}
            yield Record(**{**row, **own, "correct": bool(right)})


def write_results(path: Path, results: Results) -> None:
    """Write the file, with each list of scalars on one line."""
    text = json.dumps(results, indent=2, ensure_ascii=False)
    # Strings have escaped line breaks, so this pattern matches only real lists.
    write_text(path, re.sub(r"\[\n[^\[\]{}]*\]", lambda found: _one_line(found[0]), text) + "\n")


def digest(results: Results) -> str:
    """Digest of the results that a figure shows."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def read_results(path: Path, needed: Sequence[str] = ("environment", "modes", "sweep")) -> Results:
    """Read the results of a benchmark, or other results with the `needed` keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a needed key is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run parse-infer bench, and keep its results.json there")
    results = read_json(path, "write it again with parse-infer bench")
    missing = [key for key in needed if key not in results]
    if missing:
        raise ParseError(f"{path} has no key {missing[0]!r}: give the results.json of parse-infer bench")
    return results


def _one_line(text: str) -> str:
    return f"[{' '.join(line.strip() for line in text[1:-1].splitlines()).strip()}]"
