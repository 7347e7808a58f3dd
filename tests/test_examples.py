"""The examples run as they stand and from any folder, on less data where the whole would take minutes."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import matplotlib
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


NOTEBOOK = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)
    assert [path.stem for path in EXAMPLES.glob("*.ipynb")] == ["first_hour"]


def test_the_page_groups_all_examples() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


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


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_stores(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells need no kernel: they run here in one namespace."""
    names: dict[str, object] = {}
    printed = []
    with matplotlib.rc_context({"backend": "agg"}):
        for cell in CODE:
            exec(compile("".join(cell["source"]), "first_hour.ipynb", "exec"), names)
            printed.append(capsys.readouterr().out)
    scores, answer = printed[1:3]
    assert scores == stored(CODE[1])
    right, wrong = scores.split("\n\n")[:2]
    assert names["RED"] not in right and wrong.startswith(names["RED"])
    assert answer.split("\n\n")[0] == stored(CODE[2]).split("\n\n")[0] and "#### 132" in answer
    lost, speed = names["lost"], names["speed"]
    assert len(lost) == len(speed) == 4 and min(speed) > 0
    assert lost[0] > lost[-1] == 0, "a threshold above 1 gives the target's own answer"


def stored(cell: dict) -> str:
    return "".join(line for output in cell["outputs"] for line in output.get("text", []))


def test_the_notebook_stores_small_outputs_of_no_machine() -> None:
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)], "run all cells in order"
    assert all(cell["outputs"] for cell in CODE[1:]) and "image/png" in CODE[-1]["outputs"][-1]["data"]
    text = json.dumps([{**output, "data": None} for cell in CODE for output in cell["outputs"]])
    assert len(json.dumps(NOTEBOOK)) < 60_000 and not re.search(r"/(work|home|root|tmp|usr)/", text)


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    prose = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", prose)
    assert len(links) > 3 and not [link for link in links if not (EXAMPLES / link).is_file()]
