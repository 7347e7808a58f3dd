"""Program inside the sandbox: run a model's program, then tests or calls of a function, and report the results.

`code_checks.py` sends this file's text with a call of `main` below it. Only the standard library is available.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CALL_SECONDS = 0.3  # of CPU time
_MAX_LATE = 2  # calls
_PREPARES = {"setrecursionlimit", "append", "extend", "add", "update", "sort"}


class Late(BaseException):
    """A call took longer than `_CALL_SECONDS`. Not an Exception, which programs catch."""


def main(token: str, program: str, tests: str, name: str, calls: Sequence[str]) -> None:
    """Write the token and the outcomes of all calls. A program or test that fails or exits writes nothing."""
    out = os.dup(1)
    os.dup2(2, 1)  # nothing that the program prints is a result
    module = sys.modules["solution"] = types.ModuleType("solution")
    space = vars(module)
    random.seed(0)
    tree = ast.parse(program)
    tree.body = [node for node in tree.body if not _shows(node)]
    exec(compile(tree, "solution.py", "exec", dont_inherit=True), space)
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), space)
    found = outcomes(space[name], calls) if calls else []
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(token + json.dumps(found))


def _shows(node: ast.stmt) -> bool:
    """Whether a statement is the program's own test or example of use, and does not prepare what follows."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return getattr(node.value.func, "attr", "") not in _PREPARES
    return isinstance(node, (ast.Expr, ast.Assert))


def outcomes(function: Callable[..., Any], calls: Sequence[str]) -> list[Any]:
    """Return ["value", result] or ["raised", type of the exception] for each call, given as repr of (args, kwargs).

    The result of a function that returns None is its arguments after the call, and what it printed."""

    def stop(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGVTALRM, stop)
    found: list[Any] = []
    for call in calls:
        random.seed(0)
        if found.count(["raised", "Late"]) == _MAX_LATE:
            break
        try:
            args, kwargs = ast.literal_eval(call)
            signal.setitimer(signal.ITIMER_VIRTUAL, _CALL_SECONDS)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                value = plain(function(*args, **kwargs))
            if value is None:
                value = plain([args, kwargs, printed.getvalue()])
            json.dumps(value)
            found.append(["value", value])
        except BaseException as error:
            found.append(["raised", type(error).__name__])
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON that keeps its type. Elements of sets and keys are sorted."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return ["dict", *sorted(([plain(key), plain(each)] for key, each in value.items()), key=repr)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(map(plain, value), key=repr)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, Iterator):
        return ["iterator", *map(plain, itertools.islice(value, 1000))]
    own = hasattr(value, "__dict__") and not callable(value)
    return [type(value).__name__, plain(vars(value)) if own else repr(value)]
