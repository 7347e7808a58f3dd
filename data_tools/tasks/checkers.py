"""Checks of the answer in a completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from threading import current_thread, main_thread
from typing import Any

from parse_infer.errors import ParseError
from parse_infer.optional_dependencies import missing_package

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_SAID = re.compile(r"answer(?:\s+is\s*:?|\s*:)\s*([^\n]*)", re.IGNORECASE)
# One letter in an option's form, such as (B), B., **B**, \text{B} or B) 12 cm, and no second letter in such a form.
_CHOICE = re.compile(
    r"[\s*_$(\[\\]*(?:\\(?:text|math)(?:bf|rm)?\{)?\(?([A-J])(?:[.):\]}*_$\\]+(?=\s|$)|\s*$)"
    r"(?!.*\b[A-J](?:[.):\]}*]|\s*$))",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?(?:[$€£]\s*)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s*/\s*\d+)?"
)
_NUMBER_FIRST = re.compile(rf"[\s*$\\({{]*(?:boxed{{)?{_NUMBER.pattern}")
_ASIDE = re.compile(r"\([^()]*\)")
_LATEX: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\{,\}|\\[,!]"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d+\}?)?"), " "),  # a unit
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
)
_MIXED = re.compile(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")


def read_numbers(text: str) -> list[Fraction]:
    """Return the numbers in `text`, including LaTeX fractions.

    Thousands separators, currency, `%`, units and trailing zeros do not matter. A minus directly before a number is
    its sign."""
    found = [_value(match) for match in _NUMBER.findall(_plain(text))]
    return [number for number in found if number is not None]


def final_answer(completion: str) -> str:
    """Return the text after the last `####` or in the last `\\boxed{}`, whichever comes later.

    Without either, returns the text after "answer is", or else the whole completion. As `####` may begin a heading,
    only a `####` before a number or at the end of the completion counts."""
    marked = [(found.start(), found[1]) for found in _BOXED.finditer(completion)]
    for found in _HASHES.finditer(completion):
        if _NUMBER_FIRST.match(found[1]) or not completion[found.end() :].strip():
            marked.append((found.start(), found[1]))
    if marked:
        return max(marked)[1]
    said = _SAID.findall(completion)
    return str(said[-1]) if said else completion


def stated_number(completion: str) -> Fraction | None:
    """Return the first number of the final answer, after its last equals sign and outside brackets where possible.

    Without a marked final answer, returns the last number of the text."""
    answer = final_answer(completion)
    numbers = read_numbers(completion)[::-1] if answer is completion else _stated(answer)
    return numbers[0] if numbers else None


def same_number(reference: str, completion: str) -> bool:
    """Whether the stated numbers are equal: whole numbers exactly, other numbers to one part in a million."""
    wanted, got = stated_number(reference), stated_number(completion)
    if wanted is None or got is None:
        return False
    if wanted.denominator == got.denominator == 1:
        return wanted == got
    return abs(wanted - got) <= abs(wanted) / 1_000_000


def same_answer(one: str, other: str) -> bool:
    """Whether two completions state the same number, or the same text where a final answer is not a single number.

    A unit may follow the number. Two marked final answers that choose an option agree if their letters do."""
    answers = [final_answer(one), final_answer(other)]
    marked = [answer is not text for answer, text in zip(answers, (one, other), strict=True)]
    if all(marked) and None not in (letters := [choice_letter(answer) for answer in answers]):
        return letters[0] == letters[1]
    numeric = all(_is_number(answer) for answer, known in zip(answers, marked, strict=True) if known)
    if numeric and stated_number(one) is not None and stated_number(other) is not None:
        return same_number(one, other)
    return _bare(answers[0]) == _bare(answers[1])


def answer_line(completion: str) -> str:
    """Return a line with the same final answer for `same_answer`, such as `#### 72`; the completion without a mark."""
    answer = final_answer(completion)
    return completion if answer is completion else f"#### {_bare(answer)}"


def choice_letter(answer: str) -> str | None:
    """Return the letter A to J of a multiple-choice answer such as "(B)", "B.", "**B**" or "B) 12 cm"; else None."""
    found = _CHOICE.match(answer)
    return found[1] if found else None


def _bare(answer: str) -> str:
    """Return a final answer as one line without emphasis, dollar signs and final full stop around it."""
    return " ".join(answer.split()).lstrip("*_$ ").rstrip(".*_$ ")


def _plain(text: str) -> str:
    """Rewrite LaTeX fractions and separators as plain text."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    return _FRACTION.sub(r"\1/\2", text)


def _value(number: str) -> Fraction | None:
    whole, _, divisor = re.sub(r"[\s,$€£]", "", number.replace("−", "-")).partition("/")
    try:
        return Fraction(whole) / Fraction(divisor or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _stated(answer: str) -> list[Fraction]:
    """Return the numbers in a final answer."""
    for text in (_ASIDE.sub(" ", answer), answer):
        if numbers := read_numbers(text.rpartition("=")[2]) or read_numbers(text):
            return numbers
    return []


def _is_number(answer: str) -> bool:
    """Whether the answer is one number, after its last equals sign, with an optional unit."""
    rest = _NUMBER.sub("", _plain(_ASIDE.sub(" ", _bare(answer))).rpartition("=")[2])
    return len(_stated(answer)) == 1 and not re.search(r"[-+*/^<>:\\=]", rest)


def _matches(reference: str, completion: str) -> bool:
    return re.search(reference, completion) is not None


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


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda reference, completion: final_answer(completion).strip() == reference.strip(),
    "numeric": same_number,
    "regex": _matches,
    "choice": lambda reference, completion: choice_letter(final_answer(completion)) == reference.strip().upper(),
    "math": same_expression,
}
