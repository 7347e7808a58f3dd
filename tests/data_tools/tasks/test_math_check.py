"""Mathematical answers are compared as expressions."""

from __future__ import annotations

import json
import sys
from threading import Thread

import pytest

from data_tools.tasks.checkers import same_expression
from data_tools.tasks.registry import load_task

pytest.importorskip("math_verify", reason="math-verify is not installed (extra data)")


@pytest.mark.parametrize(
    ("reference", "completion", "right"),
    [
        ("\\frac{1}{2}", "So it is \\boxed{0.5}.", True),
        ("\\frac{1}{2}", "The answer is $\\frac{2}{4}$.", True),
        ("1/2", "#### 1/2", True),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", True),
        ("x^2+2x+1", "#### (x+1)^2", True),
        ("$x^2+2x+1$", "The answer is $(x+1)^2$, as seen above.", True),
        ("x^2+2x+1", "\\boxed{(x+2)^2}", False),
        ("It is so.\n#### 18", "First 3, then 15.\n#### 18", True),
        ("18", "First 18, then 15.\n#### 15", False),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", True),
        ("[0,1)", "\\boxed{[0,1)}", True),
        ("[0,1)", "\\boxed{[0,1]}", False),
        ("18", "no answer", False),
        ("18", "", False),
    ],
)
def test_equal_expressions_are_right(reference, completion, right):
    assert same_expression(reference, completion) is right


def test_other_threads_check_too():
    found = []
    thread = Thread(target=lambda: found.append(same_expression("1/2", "\\boxed{0.5}")))
    thread.start()
    thread.join()
    assert found == [True]


def test_without_its_package_the_check_says_so_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Expand.", "reference": "x^2+2x+1"}))
    options = {"path": str(tmp_path / "rows.jsonl"), "check_with": "math"}
    task = load_task("jsonl", **options)
    (only,) = task.problems("test")
    assert task.check(only, "#### (1+x)^2") and not task.check(only, "#### (2+x)^2")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r'the check math: the package math_verify is missing: .* "\.\[data\]"$'):
        load_task("jsonl", **options)
