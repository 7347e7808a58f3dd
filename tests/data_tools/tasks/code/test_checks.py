"""Code is right if it passes tests, or does the same as another function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_tools.labels.own_answers import OwnAnswers
from data_tools.tasks.code.calls import calls_of
from data_tools.tasks.code.checks import passes_tests, same_function
from data_tools.tasks.code.programs import main_function, read_program
from data_tools.tasks.code.sandbox import require_sandbox
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError

try:
    require_sandbox()
except ParseError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)

PROMPT = '''from typing import List


def double(x: int) -> int:
    return 2 * x


def sum_of_doubles(numbers: List[int], start: int = 0) -> int:
    """Return the sum of twice each number.
    >>> sum_of_doubles([1, 2])
    6
    """
'''
BODY = "    return start + sum(double(number) for number in numbers)\n"
TESTS = "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([], 3) == 3\n"
MAIN = f"{TESTS}\nif __name__ == '__main__':\n    check(sum_of_doubles)"  # the answer is no main program
CALLED = f"{TESTS}\ncheck(sum_of_doubles)"
CHAT = f"Sure:\n```python\ndef sum_of_doubles(numbers, start=0):\n{BODY}```\nFor example:\n```\nprint(1 / 0)\n```"


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (BODY, True),
        (CHAT, True),
        (f"```python\n{PROMPT}{BODY}```", True),
        (f"```\n{BODY}```", True),
        (BODY + "\n\nThis adds them up.", True),
        (BODY + "\n\nprint(sum_of_doubles([]))\nassert sum_of_doubles([1]) == 0\n", True),
        (BODY.replace("start +", "1 +"), False),
        (CHAT.replace("start +", "-start +"), False),
        ("    return 6 if numbers else 3\n\nimport sys\nsys.exit(0)\n", True),  # expressions outside are left out
        ("    import os\n    os._exit(0)\n", False),
        ("    raise SystemExit(0)\n", False),
        ("    print('0' * 99)\n", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_a_program_passes_its_tests_in_every_form(completion: str, right: bool) -> None:
    assert passes_tests(PROMPT, CALLED, completion) is right


def in_words(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


ADD = in_words("def add(a: int, b: int) -> int:\n    return a + b")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ADD, in_words("def add(x, y):\n    return sum([y, x])\nprint(add(2, 3))"), True),
        (ADD, in_words("def plus(x, y):\n    return x + y"), True),
        (ADD, in_words("def add(a, b):\n    return a - b"), False),
        (ADD, in_words("def add(a, b):\n    return float(a + b)"), False),
        (ADD, in_words("def add(a, b):\n    raise ValueError"), False),
        (ADD, in_words("def add(a, b):\n    while True: pass"), False),
        (ADD, in_words("def add(a, b):\n    import os\n    os._exit(0)"), False),
        (ADD, "It is 5.", False),
        ("It is 5.", "It is 5.", False),
        (in_words("def f(x):\n    return x"), in_words("def f(x):\n    return x"), False),  # no call is known
        (in_words("def f(x):\n    return x\nprint(f(3))"), in_words("def f(x):\n    return x"), True),
        (in_words("def f(x: int):\n    raise KeyError"), in_words("def f(x: int):\n    raise KeyError"), False),
        (
            in_words("def f(x: float) -> float:\n    return x * 3 / 10"),
            in_words("def f(x):\n    return 0.3 * x"),
            True,
        ),
        (
            in_words("def f(x: list[str] | None):\n    return {k: len(k) for k in x}"),
            in_words("def f(x):\n    return dict(zip(x[::-1], map(len, x[::-1])))"),
            True,
        ),
        (
            in_words("def f(x: 'list[int]'):\n    x.sort()"),
            in_words("def f(x):\n    x[:] = sorted(x, reverse=True)"),
            False,
        ),
        (in_words("def f(x: int):\n    print(x)"), in_words("def f(x):\n    print(-x)"), False),
        (in_words("def f(x: int):\n    return 1 // (x > 2)"), in_words("def f(x):\n    return 1 / (x > 2)"), False),
        (in_words("def f(x: int):\n    return x in {x}"), in_words("def f(x):\n    return 1"), False),
        (
            in_words("def f(n: int):\n    return n if n < 9 else f(n - 1) + f(n - 2)\nf(40)"),
            in_words(
                "def f(n):\n    a, b = 7, 8\n    for _ in range(n - 8): a, b = b, a + b\n    return b if n > 8 else n"
            ),
            True,  # the slow calls of the reference are left out
        ),
    ],
)
def test_functions_are_the_same_by_what_they_return(one: str, other: str, same: bool) -> None:
    assert same_function("Write a function.", one, other) is same


def test_printed_results_are_not_results() -> None:
    forged = in_words("def add(a, b):\n    return 0\nimport sys\nfor n in 1, 2: sys.stdout.write('[[\"value\", 3]]')")
    assert not same_function("Add.", ADD, forged) and not passes_tests("", "assert add(1, 2) == 3", forged)


def test_calls_come_from_examples_and_type_hints() -> None:
    program = read_program(PROMPT, CHAT)
    assert program and main_function(PROMPT, program) == "sum_of_doubles"
    calls = calls_of(PROMPT, program)
    assert calls == calls_of(PROMPT, program) and calls[0] == "(([1, 2],), {})" and len(calls) > 15
    hints = "x: Optional[Dict[str, Tuple[int, ...]]], y: Union[set[float], bool], z: 'Sequence[str]', *, k=1"
    assert len(calls_of("", f"def f({hints}): pass")) == 20
    assert calls_of("", "def f(x: Path): pass") == calls_of("", "def f(x): pass") == ()
    untyped = calls_of("e.g. f([('a', 1)], k=2) == 1", "def f(x, k=0): pass")
    assert untyped[0] == "(([('a', 1)],), {'k': 2})"
    assert calls_of("f('ab', 1) => 2", "def f(x, y): pass")[1:] and main_function("", "x = 1") == ""


def rows(path: Path, *given: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


@pytest.mark.parametrize("check", ["tests", "same_function"])
def test_code_runs_only_where_the_user_allows_it(check: str, tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", {"prompt": PROMPT, "reference": CALLED if check == "tests" else BODY})
    with pytest.raises(
        ParseError, match=f"check_with {check} runs code that .* option run_code of task jsonl to true"
    ):
        load_task("jsonl", path=path, check_with=check)
    task = load_task("jsonl", path=path, check_with=check, run_code=True)
    (only,) = task.problems("test")
    assert task.check(only, CHAT) and not task.check(only, CHAT.replace("start +", "1 +"))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("assert f(", "is not valid Python"),
        (TESTS, "tests nothing; add a call"),
        (["assert f(1)"], "tests nothing"),
        (MAIN, "tests nothing"),
    ],
)
def test_tests_that_test_nothing_are_refused(reference: object, message: str, tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", {"prompt": PROMPT, "reference": reference})
    with pytest.raises(ParseError, match=message):
        list(load_task("jsonl", path=path, check_with="tests", run_code=True).problems("test"))


def test_rows_in_the_format_of_humaneval_need_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed (extra data)")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    row = {"task_id": "T/0", "prompt": PROMPT, "test": TESTS, "entry_point": "sum_of_doubles"}
    files = {"test": rows(tmp_path / "rows.jsonl", row)}
    options = {"path": "json", "data_files": files, "id": "task_id", "run_code": True}
    template = {"reference": "{test}\ncheck({entry_point})", "instruction": "\nAnswer with a block of Python."}
    task = load_task("dataset", **options, **template, check_with="tests")
    (only,) = task.problems("test")
    assert only.id == "T/0" and task.check(only, CHAT) and not task.check(only, in_words("x = 1"))
    task = load_task("dataset", **options, check_with="same_function")
    (only,) = task.problems("test")
    assert only.reference == "" and task.check(only, CHAT) is None


def test_the_targets_own_code_is_a_reference(tmp_path: Path) -> None:
    """In a mixture with prompts whose answers are compared by text."""
    code = {"path": rows(tmp_path / "code.jsonl", {"prompt": [{"role": "user", "content": "Write `add`."}]})}
    text = {"path": rows(tmp_path / "text.jsonl", {"prompt": "Which?"}), "check_with": "none"}
    parts = [{"task": "jsonl", "check_with": "same_function", "run_code": True, **code}, {"task": "jsonl", **text}]
    task = load_task("mixture", parts=parts)
    own, problems = OwnAnswers(task), list(task.problems("train"))
    wrong = in_words("def add(a: int, b: int):\n    return a * b")
    agreeing = in_words("def add(a: int, b: int):\n    return b + a  # The answer is 4")
    problem = own.with_reference(problems[0], [wrong, "#### 5", agreeing, ADD])
    assert problem.reference == agreeing
    assert own.check(problem, ADD) and not own.check(problem, wrong) and not own.check(problem, "#### 5")
    assert own.with_reference(problems[0], ["#### 5", "#### 5"]).reference == ""
    assert own.with_reference(problems[1], [ADD, "#### 5", "\\boxed{5}"]).reference == "#### 5"
    assert own.check(Problem("p", "q", "#### 5", metadata=problems[1].metadata), "The answer is 5.")


COUNT = (
    "def prime(n):\n    return n > 1 and all(n % d for d in range(2, n))\n\n\ndef count(n: int) -> int:\n    return "
)
PREPARED = (
    "import sys\ntable = {}\ntable.update({1: 2})\nsys.setrecursionlimit(5000)\n"
    "def f(x: int):\n    return table.get(x)\n"
)
TYPED = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass P:\n    x: int\n\n\n"
    "def f(x: int):\n    return P(x).x\n"
)
DEEP = "def f(n: int):\n    made = []\n    for _ in range(800):\n        made = [made]\n    return made\n"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (f"{COUNT}sum(map(prime, range(n)))", f"{COUNT}99", False),  # the helper comes first
        (PREPARED, "def f(x: int):\n    return {1: 2}.get(x)\n", True),
        (TYPED, "def f(x: int):\n    return x\n", True),
        (DEEP, DEEP.replace("800", "801"), False),
    ],
)
def test_unusual_programs(one: str, other: str, same: bool) -> None:
    fenced = [f"```python\n{program}\n```" for program in (one, other)]
    assert same_function("Write it, please.", *fenced) is same


@pytest.mark.parametrize("hint", ["1", "tuple[()]", "'" + 900 * "a." + "'", 9 * "list[" + "int" + 9 * "]", "Unknown"])
def test_hints_without_values_give_no_calls(hint: str) -> None:
    assert calls_of("", f"def f(x: {hint}):\n    return x\n") == ()


def test_chats_in_parts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}], "reference": None}
    path.write_text(json.dumps(row) + "\n")
    task = load_task("jsonl", path=str(path), check_with="same_function", run_code=True)
    (problem,) = task.problems("test")
    assert problem.reference == "" and task.check(problem, BODY) is None
    assert task.check(Problem("p", problem.prompt, BODY), BODY)
