"""The number that a completion states."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from data_tools.tasks.answer_text import clean
from data_tools.tasks.arithmetic import plain_terms
from data_tools.tasks.final_answer import FinalAnswer, final_answer, first_clause
from data_tools.tasks.quantities import Quantity, equal_numbers, nouns, quantities_in

_MAX_CHARS = 400  # of an answer that states a number
_ASIDE = re.compile(
    r"(?<=[\w%.)])\s+[(\[](?![^()]*\b[b-z]\s*[-+*/^]|[^()]*[-+*/^]\s*[b-z]\b)[^()\[\]]*[)\]](?!\s*[*/^])"
)
_ABOUT = r"(?:\s*(?:about|approximately|approx\.?|roughly|exactly|just|only|a total of|around|nearly|almost)\b)?"
_SAME = (
    r"\s*,?\s*\(?(?:i\.?\s?e\.?,?|that is,?|in other words,?|(?:or )?equivalently,?"
    r"|which (?:is|equals|gives|makes|rounds to)"
    r"|equals|or about|or approximately|rounded to|=)"
)
_JOIN = r"(?:\s*[,;]?\s*\b(?:and|or|to|through|versus|vs\.?|plus|minus|by|over|point)\b|\s*[,;&:|—±<*+])"
_LABEL = r"(?:\s*[A-Za-z]\w{0,2}\s*=)?"
_UNITS = r"(?:\s*-?[A-Za-z.%]+){0,3}?"
# Amounts in two units: "5 feet 6 inches".
_LARGER_UNIT = (
    r"(?:\s*(?:feet|foot|ft|yards?|miles?|k?m|hours?|hrs?|h|minutes?|mins?|years?|months?|weeks?|days?|pounds?|lbs?|kg"
    r"|dollars?|euros?|gallons?|degrees)\b\.?)?"
)
_LINKS = {
    prose: (
        re.compile(rf"{_UNITS}(?:{_SAME})(?:\s*[A-Za-z]\w{{0,8}}\s*=)?{_ABOUT}\s*"),
        re.compile(rf"(?:{'' if prose else _UNITS}{_JOIN}{_LABEL}{_ABOUT}|{'' if prose else _LARGER_UNIT})\s*"),
    )
    for prose in (True, False)
}
# The number that "which is" adds explains the answer, and does not repeat it: "15, which is 3 more than 12".
_EXPLAINS = re.compile(
    r"\W*(?:\w+\s+){0,2}?(?:more|less|fewer|greater|smaller|higher|lower|times|of|per|each|for|dozens?|off|short|above|below)\b"
)
_UNSOLVED = re.compile(r"-?[\d.]+\s*\*?\s*[a-z]\s*=\s*")  # 2x = 6
_SECOND_VALUE = re.compile(r"\b[A-Za-z]\w?\s*=[^,;=]+(?:[,;]|\b(?:and|or)\b)[\s,]*(?:and|or)?\s*[A-Za-z]\w?\s*=\s*$")
_AT_LEAST = re.compile(r"(?P<is>\b(?:is|be) )?\b(?:at least|at most|no (?:more|less|fewer) than)$", re.IGNORECASE)


def stated_quantity(completion: str) -> Quantity | None:
    """Return the number of the final answer; without a mark, the last number of the text.

    Its value is None where it is part of a list, of a bound, or of a term with variables."""
    answer = final_answer(completion)
    if answer.mark != "none":
        return read_quantity(answer)
    lines = [line for line in completion.splitlines() if re.search(r"[\d½⅓⅔¼¾⅛]", line)]
    if not lines:
        return None
    several = len(completion.strip().splitlines()) > 1  # then a dash before the number begins the item of a list
    line = re.sub(r"^\s*(?:[-*•+>]|\d+[.)])\s+(?=\S)", "", lines[-1]) if several else lines[-1]
    return read_quantity(FinalAnswer(line, "none"))


def stated_number(completion: str) -> Fraction | None:
    """Return the value of the number that the final answer states; None without a single plain number."""
    quantity = stated_quantity(completion)
    return None if quantity is None else quantity.value


def same_number(reference: str, completion: str) -> bool:
    """Whether the stated numbers are equal: whole numbers exactly, other numbers to one part in a million."""
    return equal_numbers(stated_number(reference), stated_number(completion))


def read_quantity(answer: FinalAnswer) -> Quantity | None:
    """Return the number of an answer: the first one, or the last one of a sentence without a mark."""
    text = answer.text[-_MAX_CHARS:] if answer.mark == "none" else answer.text[:_MAX_CHARS]
    text = first_clause(text) if answer.mark == "cue" else text
    sentence = answer.mark == "cue" or (answer.mark == "none" and re.search(r"[a-z]{2}", text) is not None)
    text = re.sub(r"^\W*not\b.*?(?:\bbut\b|[,;.]\s+it(?:'s|\s+is)\b)", "", clean(text, sentence))
    terms = plain_terms(text)
    quantities = quantities_in(aside) if (aside := _ASIDE.sub(" ", terms)) != terms else []
    terms = aside if quantities else terms
    quantities = quantities or quantities_in(terms)
    if not quantities:
        return None
    if answer.mark == "none" and not _leads(terms, quantities[0]):
        equal = terms.rfind("=")
        right = [one for one in quantities if one.start > equal] if equal >= 0 else []
        return _linked(terms, right or quantities[::-1], prose=True)
    start = _after_equals(terms, quantities)
    return _linked(terms, quantities[start:], prose=False)


def _leads(text: str, first: Quantity) -> bool:
    """Whether a text begins like an answer: with the number, or a name and an equals sign."""
    if len(text.split()) > 9:
        return False
    return (
        re.fullmatch(
            r"\W*(?:\w{1,3}\s*=\W*)?(?:about|approximately|exactly|sqrt|at least|at most)?\W*", text[: first.start]
        )
        is not None
    )


def _after_equals(text: str, quantities: list[Quantity]) -> int:
    """Return the index of the first number after the last equals sign of the first clause."""
    end = re.search(r"[,;]|\b(?:where|when|if|with|given|so)\b|$", text)
    at = text.rfind("=", 0, end.start() if end else None)
    return next((i for i, one in enumerate(quantities) if one.start > at), 0)


def _linked(text: str, quantities: list[Quantity], prose: bool) -> Quantity:
    """Return the number that the first of `quantities` states together with the numbers that are linked to it."""
    same, rival = _LINKS[prose]
    stated, last = quantities[0], quantities[0]
    for other in quantities[1:]:
        left, right = sorted((last, other), key=lambda one: one.start)
        gap = text[left.end : right.start]
        if same.fullmatch(gap):
            if prose or _EXPLAINS.match(text, right.end):
                break
            stated = other
        elif rival.fullmatch(gap):
            if stated.value is None or not equal_numbers(stated.value, other.value):
                return replace(stated, value=None)
        else:
            break
        last = other
    label = text[: stated.start]
    if _UNSOLVED.fullmatch(label) or (prose and _SECOND_VALUE.search(label)):
        return replace(stated, value=None)
    if (at_least := _AT_LEAST.search(label.rstrip())) and (at_least["is"] or not prose):
        return replace(stated, value=None)
    named = () if prose else re.findall(r"[^\W\d_]+", label.rpartition("=")[2])
    return replace(stated, words=stated.words | nouns(named))
