"""Mathematical answers are compared as expressions."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from threading import Thread

import pytest

from data_tools.tasks import expressions
from data_tools.tasks.expressions import same_expression
from data_tools.tasks.registry import load_task

pytest.importorskip("math_verify", reason="math-verify is not installed (extra data)")


RIGHT = [
    ("12", "The answer is 12."),
    ("12", "12 apples."),
    ("-3", "-3."),
    ("12", "**12**."),
    ("\\frac{1}{2}", "1/2."),
    ("5.4", "\\boxed{\\$5.40}"),
    ("\\$5.40", "5.4"),
    ("\\$5.40", "\\boxed{5.40}"),
    ("28\\%", "\\boxed{28}"),
    ("28", "28 percent"),
    ("28", "\\boxed{28\\%}"),
    ("-2 \\le x \\le 7", "-2 \\le x \\le 7"),
    ("-2 \\le x \\le 7", "$-2 \\leq x \\leq 7$."),
    ("-2 \\le x \\le 7", "The answer is -2 ≤ x ≤ 7."),
    ("-2 \\le x \\le 7", "[-2, 7]"),
    ("[-2,7]", "-2 \\le x \\le 7"),
    ("1e-5", "10^{-5}"),
    ("10^{-5}", "1e-5"),
    ("10^{-5}", "\\boxed{1 \\times 10^{-5}}"),
    ("x^2+2x+1", "The answer is $(x+1)^2$, as seen above."),
    ("x^2+2x+1", "The answer is (x+1)^2."),
    ("x^2+2x+1", "(x+1)^2"),
    ("x^2+2x+1", "Thus the expanded form is x^2+2x+1."),
    ("x^2+2x+1", "So we get $x^2 + 2x + 1$."),
    ("x^2+2x+1", "(x+1)**2"),
    ("x^2+2x+1", "x² + 2x + 1"),
    ("\\text{Yes}", "Yes"),
    ("Yes", "The answer is **Yes**."),
    ("\\text{(B)}", "(B)"),
    ("\\sqrt{12}", "2√3"),
    ("\\sqrt{12}", "2sqrt(3)"),
    ("\\sqrt{12}", "The answer is $2\\sqrt{3}$ cm."),
    ("2\\pi", "2π"),
    ("2\\pi", "2 pi"),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
    ("5,-5", "x = 5 or x = -5"),
    ("5,-5", "\\boxed{5} and \\boxed{-5}"),
    ("\\pm 5", "5 and -5"),
    ("5,-5", "\\boxed{\\pm 5}"),
    ("(-\\infty,3)", "(-∞, 3)"),
    ("x<3", "x < 3."),
    ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\frac{\\sqrt{3}}{2}}"),
    ("\\frac{1}{1+\\frac{1}{x}}", "\\boxed{\\frac{1}{1+\\frac{1}{x}}}"),
    ("\\frac{x}{x+1}", "\\boxed{\\frac{1}{1+\\frac{1}{x}}}"),
    ("42", "\\boxed {42}"),
    ("1234", "\\boxed{1{,}234}"),
    ("1234", "1,234"),
    ("10080", "10,\\!080"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y=2x+1", "$y = 2x + 1$."),
    ("3+4i", "4i + 3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}"),
    ("30^\\circ", "30 degrees"),
    ("30", "30^\\circ"),
    ("6\\text{ cm}", "6 cm"),
    ("6", "$6\\text{ cm}^2$"),
    ("6\\sqrt{2}", "$6\\sqrt{2}$ meters"),
    ("6\\sqrt{2}", "\\boxed{6\\sqrt{2}\\text{ meters}}"),
    ("(1,2)", "\\boxed{(1, 2)}"),
    ("(1,2)", "(1,2)."),
    ("\\frac{3}{4}", "0.75"),
    ("2^{10}", "1024"),
    ("n!", "\\boxed{n!}"),
    ("\\log_2 8", "3"),
    ("9^{9^{9^9}}", "\\boxed{9^{9^{9^9}}}"),
    ("70 000", "70000"),
    ("-\\frac{1}{2}", "-½"),
    ("\\frac{7}{2}", "3 1/2"),
    ("\\frac{7}{2}", "3\\frac{1}{2}"),
    ("x \\in [-2,7]", "[-2,7]"),
    ("\\emptyset", "∅"),
    ("11\\sqrt2", "11\\sqrt{2}"),
    ("x^2+1", "#### x^2 + 1\n\nI hope this helps."),
    ("x^2+1", "The final answer is\n\n$$x^2+1$$"),
    ("x^2+1", "\\[ x^2+1 \\]"),
    ("x^2+1", "**Answer:** \\( x^2 + 1 \\)"),
    ("e^{2x}", "$e^{2x}$."),
    ("\\frac{a}{b}", "a/b"),
    ("1,2,3", "1, 2, and 3"),
    ("no solution", "No solution."),
    ("\\text{no solution}", "no solution"),
    ("1/2", "#### 1/2"),
    ("\\frac{1}{2}", "The answer is $\\frac{2}{4}$."),
    ("x^2+2x+1", "#### (x+1)^2"),
    ("It is so.\n#### 18", "First 3, then 15.\n#### 18"),
    ("[0,1)", "\\boxed{[0,1)}"),
]
WRONG = [
    ("12", "13"),
    ("5", "5x"),
    ("5", "5 or 6"),
    ("5", "> 5"),
    ("5", "x > 5"),
    ("\\sqrt{5}", "5"),
    ("evil", "live"),
    ("\\text{evil}", "\\text{live}"),
    ("Yes", "No"),
    ("x^2+2x+1", "\\boxed{(x+2)^2}"),
    ("[0,1)", "\\boxed{[0,1]}"),
    ("(1,2)", "(2,1)"),
    ("18", "no answer"),
    ("18", ""),
    ("18", "First 18, then 15.\n#### 15"),
    ("x=5,y=6", "x=7,y=6"),
    ("2x", "2y"),
    ("3", "3!"),
    ("\\frac{x}{y}", "\\frac{1}{1+\\frac{1}{x}}"),
    ("x", "\\boxed{x} and so \\boxed{\\frac{1}{1+\\frac{1}{x}}}"),
    ("5", "5, 6"),
    ("-2 \\le x \\le 7", "-2 < x < 7"),
    ("28", "0.28"),
    ("1000001", "1000000"),
    ("x+1", "x-1"),
    ("5", "\\boxed{5\\pi}"),
    ("B", "C"),
    ("\\text{Monday}", "\\text{Tuesday}"),
    ("(1,2)", "12"),
    ("5", "-5"),
    ("1.5", "1.5 million"),
    ("10^{-5}", "10^{5}"),
    ("72", "27"),
    ("\\{1,2\\}", "\\{1,3\\}"),
    ("x=5", "x=6"),
    ("x^2", "2x"),
    ("\\pi", "3.14"),
    ("\\frac{1}{3}", "0.33"),
    ("no solution", "one solution"),
]


@pytest.mark.parametrize(("reference", "completion"), RIGHT)
def test_equal_expressions_are_right(reference: str, completion: str) -> None:
    assert same_expression(reference, completion)


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_other_expressions_are_wrong(reference: str, completion: str) -> None:
    assert not same_expression(reference, completion)


def test_every_thread_checks_in_one_process_within_a_limit_of_time() -> None:
    found: dict[str, bool] = {}

    def check(reference: str, completion: str) -> None:
        found[completion] = same_expression(reference, completion)

    pairs = [("x+1", "\\boxed{1+x}"), ("x", "\\boxed{9^{9^{9^9}}}"), ("y+1", "\\boxed{1+y}"), ("z+1", "\\boxed{z}")]
    threads = [Thread(target=check, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[completion] for _, completion in pairs] == [True, False, True, False]
    process = expressions._COMPARISONS._process
    assert same_expression("a+b", "\\boxed{b+a}") and expressions._COMPARISONS._process is process


def _check(pair: tuple[str, str]) -> bool:
    return same_expression(*pair)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.slow
def test_processes_that_were_forked_or_spawned_check_too(start: str) -> None:
    assert same_expression("a+b", "\\boxed{b+a}")
    with multiprocessing.get_context(start).Pool(2) as pool:
        assert pool.map(_check, [("a+b", "b+a"), ("a+b", "a-b")] * 4) == [True, False] * 4
    assert same_expression("a+c", "\\boxed{c+a}"), "the parent's process goes on"


@pytest.mark.slow
def test_no_process_is_left_at_the_end() -> None:
    code = (
        "from data_tools.tasks import expressions as e; assert e.same_expression('a+b', 'b+a'); "
        "print(e._COMPARISONS._process.pid)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout), 0)


def test_without_its_package_the_check_says_so_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Expand.", "reference": "x^2+2x+1"}))
    options = {"path": str(tmp_path / "rows.jsonl"), "check_with": "math"}
    task = load_task("jsonl", **options)
    (only,) = task.problems("test")
    assert task.check(only, "#### (1+x)^2") and not task.check(only, "#### (2+x)^2")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r'the check math: the package math_verify is missing: .* "\.\[data\]"$'):
        load_task("jsonl", **options)
