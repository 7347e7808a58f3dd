"""Check of a mathematical answer, which may have another form than the reference."""

from __future__ import annotations

from threading import current_thread, main_thread
from typing import Any

from data_tools.tasks.checkers import final_answer
from parse_infer.errors import ParseError
from parse_infer.optional_dependencies import missing_package


def same_expression(reference: str, completion: str) -> bool:
    """Whether the final answers are equal by math-verify: numbers, expressions, sets, intervals and matrices.

    Comparisons of more than 5 seconds count as different. Raises ValueError without the package math-verify.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ParseError(f"the check math: {missing_package(error)}") from error
    # math-verify limits time by signals, which only the main thread may use.
    seconds: Any = 5 if current_thread() is main_thread() else None
    answer = final_answer(completion)
    texts = _marked(final_answer(reference)), completion if answer is completion else _marked(answer)
    wanted, got = (parse(text, parsing_timeout=seconds) for text in texts)
    return bool(wanted and got and verify(wanted, got, timeout_seconds=seconds))


def _marked(answer: str) -> str:
    """Mark LaTeX, which math-verify does not read in plain text."""
    return answer if "$" in answer else f"\\boxed{{{answer}}}"
