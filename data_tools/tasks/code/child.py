"""Program inside the sandbox: run a model's program, then tests or calls of a function, and report the results.

`checks.py` sends this file's text with a call of `main` below it. Only the standard library is available.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CALL_SECONDS = 0.3  # of CPU time
_EXAMPLES_SECONDS = 1.0
_MAX_LATE = 2  # calls


class Discard(io.RawIOBase):
    """Output that goes nowhere."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


class Late(BaseException):
    """A call took too long. Not an Exception, which programs catch."""


def main(token: str, program: str, tests: str, name: str, calls: Sequence[str]) -> None:
    """Write the token and the outcomes of all calls. A program or test that fails or exits writes nothing."""
    out = os.dup(1)
    os.dup2(2, 1)  # nothing that the program prints is a result
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(Discard()))  # a file has a limit of its size
    time.sleep = lambda seconds: None
    module = sys.modules["solution"] = types.ModuleType("solution")
    space = vars(module)
    random.seed(0)
    run(program, space)
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), space)
    found = outcomes(space[name], calls) if calls else []
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(token + json.dumps(found))


def run(program: str, space: dict[str, Any]) -> None:
    """Run the statements of a program one by one, and ignore their errors.

    Many are examples of use, which read input, fail on purpose, or never end. All but definitions and constants share
    `_EXAMPLES_SECONDS`. What an error leaves undefined is an error again where a call or test needs it."""
    flags, remaining = 0, _EXAMPLES_SECONDS
    for node in ast.parse(program).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            flags |= sum(getattr(__future__, each.name).compiler_flag for each in node.names)
        code = compile(ast.Module([node], []), "solution.py", "exec", flags, dont_inherit=True)
        if defines(node):
            with contextlib.suppress(BaseException):
                exec(code, space)
        elif remaining > 0:
            began = time.process_time()
            with contextlib.suppress(BaseException), limited(remaining):
                exec(code, space)
            remaining -= time.process_time() - began


def defines(node: ast.stmt) -> bool:
    """Whether a statement defines a function or class, or names a constant."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(each, ast.Call) for each in ast.walk(node))
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Late in the block after so many seconds of CPU time."""

    def stop(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def outcomes(function: Callable[..., Any], calls: Sequence[str]) -> list[Any]:
    """Return ["value", result] or ["raised", type of the exception] for each call, given as repr of (args, kwargs).

    The result of a function that returns None is its arguments after the call, and what it printed."""
    found: list[Any] = []
    for call in calls:
        random.seed(0)
        if found.count(["raised", "Late"]) == _MAX_LATE:
            break
        try:
            args, kwargs = ast.literal_eval(call)
            with limited(_CALL_SECONDS), contextlib.redirect_stdout(io.StringIO()) as printed:
                value = plain(function(*args, **kwargs))
            if value is None:
                value = plain([args, kwargs, printed.getvalue()])
            json.dumps(value)
            found.append(["value", value])
        except BaseException as error:
            found.append(["raised", type(error).__name__])
    return found


def plain(value: object) -> object:
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
