"""`results.json`: the figures of a benchmark and their records, without texts.

Records are stored in columns, `{"problems": [id, …], "repeats": R, "modes": {mode: {field: [value, …]}}}`: all
problems of the first repeat, then of the next. A sweep has only the first problems. Empty columns are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from parse_infer.evaluation.records import Record
from parse_infer.files import write_text

_FIELDS = [f.name for f in fields(Record) if f.name not in ("problem_id", "digest", "mode", "repeat", "text")]


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
        columns[mode]["correct"] = [right if right is None else int(right) for right in values["correct"]]
    repeats = 1 + max((record.repeat for record in records), default=0)
    return {"problems": list(problem_ids), "repeats": repeats, "modes": columns}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write the file, with each list of scalars on one line."""
    text = json.dumps(results, indent=2, ensure_ascii=False)
    # Strings have escaped line breaks, so this pattern matches only real lists.
    write_text(path, re.sub(r"\[\n[^\[\]{}]*\]", lambda match: _one_line(match[0]), text) + "\n")


def digest(results: dict[str, Any]) -> str:
    """Digest of the results that a figure shows."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def _one_line(text: str) -> str:
    return f"[{' '.join(line.strip() for line in text[1:-1].splitlines()).strip()}]"
