"""The loop of long measurements: each run once, in order, on disk before the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.evaluation.records import AnswerFigures
from parse_infer.request.output import Generation, Statistics, Timings


@dataclass(frozen=True)
class Square:
    key: int
    value: int


def test_an_interrupted_measurement_runs_only_what_is_missing(tmp_path: Path, capsys):
    asked: list[list[int]] = []

    def measure(pending: list[int]) -> Iterator[Square]:
        asked.append(pending)
        for n in pending:
            if len(asked) == 1 and n == 2:
                raise KeyboardInterrupt
            yield Square(n, n * n)
            assert (tmp_path / "records.jsonl").read_text().splitlines()[-1] == f'{{"key": {n}, "value": {n * n}}}'

    def run() -> list[Square]:
        return run_missing(RecordStore(tmp_path, {}, Square), {n: n for n in range(4)}, measure, "squares")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "the same command continues where it stopped" in capsys.readouterr().err
    assert run() == run() == [Square(n, n * n) for n in range(4)]
    assert asked == [[0, 1, 2, 3], [2, 3]], "the third time nothing is missing"


@pytest.mark.parametrize("line", [b'{"key": 1, "value": "\xff"}', b'{"key": [1], "value": 1}'])
def test_a_damaged_record_is_named_by_file_and_line(tmp_path: Path, line: bytes):
    RecordStore(tmp_path, {}, Square).append(Square(0, 0))
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 2 is damaged .*: delete the line to measure"):
        RecordStore(tmp_path, {}, Square)


def test_a_record_takes_its_figures_by_name():
    generation = Generation("four", [1, 2], [], "eos", Statistics(draft_tokens=5, target_forwards=3), Timings())
    answer = AnswerFigures.of(generation, 0.123456, accepted_tokens=None)
    assert (answer.text, answer.n_tokens, answer.seconds, answer.finish_reason) == ("four", 2, 0.1235, "eos")
    assert (answer.target_forwards, answer.draft_tokens, answer.accepted_tokens) == (3, 5, None)
