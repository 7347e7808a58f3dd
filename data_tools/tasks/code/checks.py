"""Checks that run the code of a completion in the sandbox."""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_tools.tasks.code.calls import calls_of
from data_tools.tasks.code.programs import main_function, read_program
from data_tools.tasks.code.python_text import parse
from data_tools.tasks.code.sandbox import run_python

_CHILD = Path(__file__).with_name("child.py")
_TOLERANCE = 1e-6  # of floats
_LATE = ["raised", "Late"]


def passes_tests(prompt: str, tests: str, completion: str) -> bool:
    """Whether the completion's program runs to its end, and so does `tests`, Python code that follows it."""
    program = read_program(prompt, completion)
    return program is not None and _run(program, tests=tests) is not None


def same_function(prompt: str, reference: str, completion: str, tolerance: float = _TOLERANCE) -> bool:
    """Whether the functions of two completions return the same, or raise the same type of exception, in equal calls.

    Floats may differ by `tolerance`, relative or absolute. Calls in which the reference takes too long are left out.
    Without any call in which the reference returns a value, for example without a function, nothing is shown to be the
    same."""
    expected_program, program = read_program(prompt, reference), read_program(prompt, completion)
    if expected_program is None or program is None or not (calls := calls_of(prompt, expected_program)):
        return False
    expected = _run(expected_program, main_function(prompt, expected_program), calls)
    got = expected and _run(program, main_function(prompt, program), calls)
    if not expected or not got or all(kind == "raised" for kind, _ in expected):
        return False
    got = got + [_LATE] * (len(expected) - len(got))
    try:
        return all(one == _LATE or _equal(one, other, tolerance) for one, other in zip(expected, got, strict=False))
    except RecursionError:  # too deep to compare
        return False


CODE_CHECKS: dict[str, Callable[[str, str, str], bool]] = {"tests": passes_tests, "same_function": same_function}


def error_in_tests(tests: str) -> str | None:
    """Return what is wrong with the test code of a row, or None."""
    tree = parse(tests)
    if tree is None:
        return "is not valid Python"
    idle = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    # The program is no main program, so what asks for one does not run.
    active = [node for node in tree.body if not isinstance(node, idle) and "__name__" not in ast.unparse(node)]
    if not any(isinstance(node, (ast.Call, ast.Assert)) for each in active for node in ast.walk(each)):
        return "tests nothing; add a call such as check(NAME_OF_THE_FUNCTION)"
    return None


@lru_cache(maxsize=256)
def _run(program: str, name: str = "", calls: tuple[str, ...] = (), tests: str = "") -> list[Any] | None:
    """Return the outcomes of the calls, or None where the program or its tests do not run to their end.

    The outcomes follow a random token, so nothing that the program prints is mistaken for them. A program that
    reads its own file `main.py` could forge them."""
    token = secrets.token_hex(16)
    call = f"main({token!r}, {program!r}, {tests!r}, {name!r}, {calls!r})"
    run = run_python(f"{_CHILD.read_text(encoding='utf-8')}\n{call}\n")
    try:
        return list(json.loads(run.stdout.removeprefix(token))) if run.stdout.startswith(token) else None
    except (ValueError, RecursionError):  # incomplete, or too deep
        return None


def _equal(one: object, other: object, tolerance: float) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or (one != one and other != other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(one == other)
