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
    ("12", "**The answer is 12.**"),
    ("\\frac{1}{2}", "½"),
    ("\\frac{3}{2}", "1½"),
    ("5.40", "\\$5.40 per pound"),
    ("\\$18.90", "18.9"),
    ("18.90", "\\boxed{\\$18.90}"),
    ("75\\%", "75 \\%"),
    ("75", "\\boxed{75\\%}"),
    ("75\\%", "75 percent."),
    ("x \\le 3", "x ≤ 3"),
    ("x \\geq 3", "x >= 3"),
    ("3 \\le x", "x \\ge 3"),
    ("0 < x < 1", "(0,1)"),
    ("2.5e-3", "0.0025"),
    ("2.5 \\times 10^{-3}", "2.5e-3"),
    ("\\boxed{7}", "7"),
    ("7 \\text{ inches}", "7 inches"),
    ("7", "7\\text{ inches}."),
    ("\\frac{9}{4}", "The answer is \\(\\frac{9}{4}\\)."),
    ("\\frac{9}{4}", "$\\frac94$"),
    ("\\frac{9}{4}", "9/4"),
    ("\\frac{9}{4}", "2.25"),
    ("\\frac{9}{4}", "2 1/4"),
    ("2\\sqrt{5}", "\\sqrt{20}"),
    ("2\\sqrt{5}", "2√5."),
    ("2\\sqrt{5}", "The answer is 2\\sqrt{5}."),
    ("\\frac{\\sqrt{2}}{2}", "1/√2"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("x = 2, y = 3", "y = 3, x = 2"),
    ("(2, 3)", "(2,3)."),
    ("\\left(2, 3\\right)", "(2,3)"),
    ("\\left( \\frac{1}{2}, 3 \\right)", "(0.5, 3)"),
    ("3\\pi", "3π square units"),
    ("3\\pi", "3 \\pi \\text{ cm}^2"),
    ("x^3 - 1", "The final answer is $x^3 - 1$. I hope it is correct."),
    ("x^3-1", "**Final Answer**\n\n\\[\n\\boxed{x^3 - 1}\n\\]"),
    ("(x-1)(x^2+x+1)", "x^3-1"),
    ("A", "A"),
    ("\\text{A}", "A"),
    ("\\text{Saturday}", "Saturday."),
    ("\\text{odd}", "odd"),
    ("\\text{June 20}", "June 20"),
    ("1,2,4", "\\{1,2,4\\}"),
    ("1,2,4", "1, 2 and 4"),
    ("1,2,4", "x = 1, 2, 4"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("[-1, 1]", "$[-1,1]$"),
    ("(-\\infty, -1] \\cup [1, \\infty)", "(-∞, -1] ∪ [1, ∞)"),
    ("90^\\circ", "90°"),
    ("90", "90 degrees"),
    ("1+2i", "1 + 2i."),
    ("-1", "negative 1"),
    ("10", "x=10"),
    ("f(x) = x^2", "x^2"),
    ("10,080", "10080"),
    ("10,\\!080", "10 080"),
    ("5", "\\boxed{\\text{The answer is } 5}"),
    ("5", "\\boxed{x = 5}"),
    ("\\log 2", "log 2"),
    ("\\sin x", "sin(x)"),
    ("e^2", "e^{2}"),
    ("2^{100}", "2^{100}"),
    ("100!", "100!"),
    ("\\tfrac{1}{3}", "\\dfrac{1}{3}"),
    ("0.\\overline{3}", "0.\\overline{3}"),
    ("y=-2x+3", "$y = 3 - 2x$"),
    ("\\overline{AB}", "\\overline{AB}"),
    ("a^2+b^2", "b²+a²"),
    ("11_2", "11_2"),
    ("1100_2", "1100_{2}"),
    ("x+5", "\\text{x+5}"),
    ("\\$32,\\!500", "32500"),
    ("6 - 5i", "6-5i"),
    ("\\pi", "pi"),
    ("\\sqrt{3}", "sqrt(3)"),
    ("\\text{east}", "east"),
    ("$\\frac{1}{6}$", "\\boxed{\\frac{1}{6}}"),
    ("(3,\\frac{\\pi}{2})", "\\left(3, \\frac{\\pi}{2}\\right)"),
    ("70 \\sqrt{2}", "70\\sqrt2"),
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
    ("-2 \\le x \\le 7", "7 \\geq x \\geq -2"),
    ("x \\le -1 \\text{ or } x > 3", "(-\\infty,-1] \\cup (3,\\infty)"),
    ("(-\\infty,-1) \\cup [3,\\infty)", "x < -1 or x ≥ 3."),
    ("\\text{(C)}", "C"),
]
WRONG = [
    ("12", "21"),
    ("5", "5\\sqrt{2}"),
    ("\\frac{9}{4}", "\\frac{4}{9}"),
    ("2\\sqrt{5}", "5\\sqrt{2}"),
    ("x \\le 3", "x \\ge 3"),
    ("x \\le 3", "x < 3"),
    ("[-1,1]", "(-1,1)"),
    ("75", "0.75"),
    ("x^3-1", "x^3+1"),
    ("1,2,4", "1,2,5"),
    ("1,2,4", "1,2"),
    ("1", "1,2"),
    ("\\text{Saturday}", "Sunday"),
    ("\\text{odd}", "even"),
    ("A", "B"),
    ("(2,3)", "(3,2)"),
    ("3\\pi", "3"),
    ("1+2i", "1-2i"),
    ("1100_2", "1100_3"),
    ("5", "$5 million"),
    ("90", "9"),
    ("1e-5", "1e5"),
    ("10^{-5}", "-10^5"),
    ("\\$5.40", "\\$5.04"),
    ("-2 \\le x \\le 7", "-2 \\le x \\le 8"),
    ("-2 \\le x \\le 7", "x \\le 7"),
    ("listen", "silent"),
    ("\\text{no}", "on"),
    ("\\sin x", "\\cos x"),
    ("2x+1", "2y+1"),
    ("5", "5!"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("e^2", "7.389"),
    ("\\sqrt{2}", "1.41"),
    ("0", "\\emptyset"),
    ("\\text{June 20}", "\\text{July 20}"),
    ("x", "y"),
    ("5 \\text{ or } 6", "5"),
    ("\\frac{1}{1+\\frac{1}{x}}", "\\boxed{1} so \\boxed{\\frac{1}{1+\\frac{1}{1+\\frac{1}{x}}}}"),
    ("6", "6 or 7"),
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
    ("n!", "n"),
    ("\\text{(C)}", "D"),
    ("x \\le -1 \\text{ or } x > 3", "(-\\infty,-1] \\cup [3,\\infty)"),
    ("\\frac{1}{3}", "0.33"),
    ("no solution", "one solution"),
]


@pytest.mark.parametrize(("reference", "completion"), RIGHT)
def test_equal_expressions_are_right(reference: str, completion: str) -> None:
    assert same_expression(reference, completion)


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_other_expressions_are_wrong(reference: str, completion: str) -> None:
    assert not same_expression(reference, completion)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_long_comparison_ends_and_the_next_one_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_COMPARISONS", comparisons := expressions._Comparisons())
    first = comparisons._start()
    first.kill()  # as the limit of CPU time does
    assert not comparisons.equal("a+b", "b+a") and comparisons._process is None
    assert comparisons.equal("a+b", "b+a") and first.poll() is not None
    comparisons.stop()


def test_a_missing_package_is_reported_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Expand.", "reference": "x^2+2x+1"}))
    options = {"path": str(tmp_path / "rows.jsonl"), "check_with": "math"}
    task = load_task("jsonl", **options)
    (only,) = task.problems("test")
    assert task.check(only, "#### (1+x)^2") and not task.check(only, "#### (2+x)^2")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r'the check math: the package math_verify is missing: .* "\.\[data\]"$'):
        load_task("jsonl", **options)
