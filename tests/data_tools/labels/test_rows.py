"""Labelled drafts in files: what is accepted, what is refused and how it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.rows import LabelledDraft, read_rows

ROW = {
    "prompt": "1+1?",
    "completions": ["one", "two\n", "three"],
    "labels": [True, True, False],
    "draft_ids": [5, 6, 7],
    "cuts": [1, 2, 3],
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def list_rows(source: str | Path) -> list[LabelledDraft]:
    return list(read_rows(source))


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write(tmp_path / "data" / "b.jsonl", ROW | {"problem_id": 2}, ROW)
    write(tmp_path / "data" / "a.jsonl", ROW | {"values": [1.0, 0.5, None]})
    rows = list_rows(tmp_path)
    assert [row.values for row in rows] == [[1.0, 0.5, None], [None] * 3, [None] * 3]
    assert [row.problem_id for row in rows] == [None, "2", None] and rows[0].cuts == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": 7}, "prompt must be"),
        ({"completions": "text"}, "completions must be a list"),
        ({"labels": [True, True]}, "labels must be 3 booleans"),
        ({"labels": [1, 1, 0]}, "labels must be 3 booleans"),
        ({"values": [0.5, 2, None]}, "values must be 3 numbers"),
        ({"confidence": [1.0, 0.4, 1.0]}, "confidence must be 3 numbers from 0.5 to 1"),
        ({"confidence": [1.0]}, "confidence must be 3 numbers"),
        ({"confidence": 0.9}, "confidence must be 3 numbers"),
        ({"prompt": ["Hi"]}, "a chat message must be an object"),
        ({"draft_ids": None}, "no draft_ids or no cuts, so it is not of a build: label drafts with parse-data build$"),
        ({"cuts": None}, "no draft_ids or no cuts"),
        ({"cuts": [1, 1, 3]}, "rising offsets that end at 3"),
        ({"cuts": [1, 2, 4]}, "rising offsets that end at 3"),
        ({"draft_ids": [5, -6, 7]}, "token ids"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    file = write(tmp_path / "rows.jsonl", ROW, ROW | change)
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: .*{reason}"):
        list_rows(file)


def test_a_half_written_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:20])
    with pytest.raises(ValueError, match="line 2: not complete JSON"):
        list_rows(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/rows.jsonl", "./nowhere", "some/set"])
def test_missing_data_is_said(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no labelled data at {source}"):
        list_rows(source)


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no .jsonl"):
        list_rows(tmp_path)
