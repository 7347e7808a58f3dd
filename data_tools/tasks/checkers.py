"""Whether a completion states the right answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_ANSWER = re.compile(r"####\s*([^\n]*)")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SAID = re.compile(r"answer(?:\s+is|\s*:)\s*([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:[$€£]\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")


def read_number(text: str, first: bool = False) -> Fraction | None:
    """The last number in `text`, or the first: thousands separators, currency, `%`, units and trailing zeros do not
    matter. A minus belongs to a number that follows it directly, and `\\frac{1}{2}` is one."""
    found = _NUMBER.findall(_FRACTION.sub(r"\1/\2", text))
    if not found:
        return None
    clean = re.sub(r"[\s,$€£]", "", found[0 if first else -1].replace("−", "-"))
    try:
        return Fraction(clean)
    except (ValueError, ZeroDivisionError):
        return None


def final_answer(completion: str) -> str:
    """What states the answer: the text after the last `####`, in `\\boxed{}`, after "answer is", else all of it."""
    for pattern in (_ANSWER, _BOXED, _SAID):
        found = pattern.findall(completion)
        if found:
            return found[-1]
    return completion


def stated_number(completion: str) -> Fraction | None:
    """The number in the final answer: directly behind `####`, elsewhere the last one."""
    return read_number(final_answer(completion), first=_ANSWER.search(completion) is not None)


def same_number(reference: str, completion: str) -> bool:
    """Numeric equality of the stated answers, to one part in a million."""
    wanted, got = stated_number(reference), stated_number(completion)
    if wanted is None or got is None:
        return False
    return abs(wanted - got) <= abs(wanted) / 1_000_000


def same_answer(one: str, other: str) -> bool:
    """Whether two completions state the same answer: the same number, or the same text where one states none."""
    if stated_number(one) is not None and stated_number(other) is not None:
        return same_number(one, other)
    return final_answer(one).strip() == final_answer(other).strip()


def _matches(reference: str, completion: str) -> bool:
    return re.search(reference, completion) is not None


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda reference, completion: final_answer(completion).strip() == reference.strip(),
    "numeric": same_number,
    "regex": _matches,
}
