"""Python source that may be incomplete: whether it compiles, and which of its statements do."""

from __future__ import annotations

import ast
import re
import warnings

_CONTINUES = re.compile(r"\s|[)\]}]|(?:else|elif|except|finally)\b|$")  # the statement of the lines before


def parse(code: str) -> ast.Module | None:
    """Return the syntax tree, or None if Python does not compile the code."""
    tree = _compile(code)
    return tree if isinstance(tree, ast.Module) else None


def valid_statements(code: str, cut: bool = False) -> str:
    """Return the code without the top-level statements that are no valid Python, such as prose.

    Args:
        cut: whether the code may end in the middle. Of its last statement, the longest valid beginning stays.
    """
    lines = code.split("\n")
    while lines and not isinstance(error := _compile("\n".join(lines)), ast.Module):
        starts = _starts(lines)
        first = max((start for start in starts if start <= _line_of(error, len(lines))), default=0)
        end = min((start for start in starts if start > first), default=len(lines))
        if cut and end == len(lines):
            lines.pop()
        else:
            del lines[first:end]
    return "\n".join(lines)


def _compile(code: str) -> ast.Module | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings
        try:
            tree = ast.parse(code)
            compile(tree, "program", "exec", dont_inherit=True)  # more than the syntax: "'return' outside function"
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return error
    return tree


def _starts(lines: list[str]) -> list[int]:
    """Return the lines on which a statement of the top level begins. A decorator belongs to its definition."""
    starts, decorated = [], False
    for number, line in enumerate(lines):
        if _CONTINUES.match(line):
            continue
        if not decorated:
            starts.append(number)
        decorated = line.startswith("@")
    return starts


def _line_of(error: Exception, count: int) -> int:
    """Return the index of the line that an error is about, which is not always where Python noticed it."""
    about = re.search(r"on line (\d+)", str(error)) if isinstance(error, IndentationError) else None
    line = int(about[1]) if about else getattr(error, "lineno", None) or count
    return max(0, min(line, count) - 1)
