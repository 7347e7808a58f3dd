"""The examples run as they stand and from any folder, on less data where the whole would take minutes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# For each example: its options here, and what it must print.
RUNS = {
    "generate": ([], "draft tokens were accepted"),
    "stream": ([], "target forwards]"),
    "score": ([], "the first error is in step 1"),
    "serve": ([], "draft tokens accepted:"),
    "train": (
        ["--limit", "24", "--max_steps", "1", "--min_wrong_drafts", "1"],
        "Use it: parse-infer generate --adapter",
    ),
    "calibrate": (["--limit", "12"], "####"),
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


SLOW = ("train", "calibrate", "serve")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS])
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, printed = RUNS[name]
    if name in ("train", "calibrate"):
        options = [*options, "--out", str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err
    assert printed in capsys.readouterr().out
