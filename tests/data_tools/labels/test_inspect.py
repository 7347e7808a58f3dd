"""What `parse-data inspect` prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_tools.cli import main
from data_tools.labels.inspect import inspect_folder
from data_tools.labels.rows import LabelledDraft, check_row, read_rows
from data_tools.labels.summary import summarise_labels


def row(labels: list[bool], **more: Any) -> dict[str, Any]:
    segments = [f"step {i}\n" for i in range(len(labels))]
    tokens = {"draft_ids": [1] * len(labels), "cuts": [*range(1, len(labels) + 1)]}
    return {"prompt": "How many?", "completions": segments, "labels": labels} | tokens | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten drafts of five problems: six valid throughout, three with the first error at the start, one late."""
    rows = [row([True] * 4, problem_id=f"p{i % 5}", draft_correct=True, temperature=0.0) for i in range(6)]
    rows += [row([False] * 4, problem_id=f"p{i}", target_value=1.0, temperature=1.0) for i in range(3)]
    rows += [row([True] * 9 + [False], problem_id="p4", values=[None] * 9 + [0.0], finished=False)]
    (tmp_path / "data").mkdir()
    lines = [json.dumps(r) + "\n" for r in rows]
    (tmp_path / "data" / "train-000000-000002.jsonl").write_text("".join(lines[:4]))
    (tmp_path / "data" / "train-000002-000005.jsonl").write_text("".join(lines[4:]))
    return tmp_path


def printed(folder: Path, *, colour: bool = False, **options: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=colour, color_system="standard" if colour else None)
    inspect_folder(folder, console=console, **options)
    return stream.getvalue()


def test_counts_balance_and_error_positions(folder: Path) -> None:
    summary = inspect_folder(folder, console=Console(file=io.StringIO()))
    assert (summary.rows, summary.problems, summary.prefixes, summary.valid) == (10, 5, 46, 33)
    assert (summary.measured, summary.correct, summary.unfinished, summary.with_error) == (1, 6, 1, 4)
    assert summary.error_position == [3, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert dict(summary.error_segment) == {0: 3, 9: 1}
    assert summary.temperatures == {0.0: (6, 6, 6, 24, 24), 1.0: (3, 0, 0, 12, 0)}
    text = printed(folder)
    assert "33 (71.7%)" in text and "33 valid, 13 not valid prefixes" in text
    assert "90-100 %" in text and "right at temperature 0" in text
    assert "tokens a perfect judge keeps at temperature 0" in text


def test_a_perfect_judge_keeps_the_tokens_before_the_first_error() -> None:
    def draft(labels: list[bool], cuts: list[int], temperature: float) -> LabelledDraft:
        return check_row(row(labels, cuts=cuts, draft_ids=[1] * cuts[-1], temperature=temperature), "here")

    drafts = [
        draft([True, True], [4, 10], 0.0),
        draft([True, False, True], [5, 10, 20], 0.0),  # what follows a failure is not kept
        draft([False], [7], 1.0),
    ]
    assert [d.kept_by_oracle for d in drafts] == [10, 5, 0]
    lines = dict(summarise_labels(drafts).lines())
    assert lines["tokens a perfect judge keeps at temperature 0"] == "15 (50.0%); whole drafts 1 (50.0%)"
    assert lines["tokens a perfect judge keeps at temperature 1"] == "0 (0.0%); whole drafts 0 (0.0%)"


def test_examples_are_coloured_by_label_and_repeatable(folder: Path) -> None:
    text = printed(folder, colour=True, n_examples=4)
    assert "\x1b[32mstep 0" in text  # green
    assert "\x1b[31mstep 0" in text  # red
    assert text == printed(folder, colour=True, n_examples=4)
    assert printed(folder, n_examples=0).count("How many?") == 0
    assert printed(folder, n_examples=4).count("How many?") == 4
    assert printed(folder, n_examples=99).count("How many?") == 10


def test_undecided_prefixes_and_the_confidence_of_labels_are_shown(tmp_path: Path) -> None:
    tokens = {"draft_ids": [1, 2, 3], "cuts": [1, 3], "finished": True}
    sampled = row([True, False], **tokens, values=[0.75, 0.0], confidence=[0.96, 1.0], undecided=3)
    nothing = row([], draft_ids=[], cuts=[], undecided=5, finished=False)
    greedy = row([True, True], **tokens)  # from before there was a confidence
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (sampled, nothing, greedy)))
    text = printed(tmp_path)
    summary = summarise_labels(read_rows(tmp_path))
    lines = dict(summary.lines())
    assert (summary.rows, summary.prefixes, summary.undecided) == (2, 4, 8)
    assert lines["undecided prefixes, left out"] == "8 (66.7%)"
    assert lines["mean confidence of a label"] == "0.990"
    assert lines["drafts without any label, left out"] == "1"
    assert lines["drafts without error"] == "1 (50.0%)"
    assert all(name in text and figure in text for name, figure in lines.items())
    assert "✓ 0.75 (96.0% sure)" in text and "✗ 0 (" not in text
    assert "3 prefixes undecided" in text


def test_markup_in_the_data_is_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row([True]) | {"prompt": "[bold]x[/nope]"}) + "\n")
    assert "[bold]x[/nope]" in printed(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row([True]) | {"prompt": [{"role": "user", "content": "hi"}]}))
    assert "user: hi" in printed(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", ', "rows.jsonl, line 2: not complete JSON"),
        ("[1]", "line 2: a row must be a JSON object"),
        ('{"prompt": "p", "labels": []}', "line 2: the key completions is missing"),
        (
            '{"prompt": "p", "completions": ["a"], "labels": []}',
            "labels must be 1 booleans, one per segment, got []",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row([True])) + "\n" + line + "\n")
    assert main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_folders_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == main(["inspect", str(tmp_path / "none")]) == 2
    assert main(["inspect", str(tmp_path), "--examples", "-1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
