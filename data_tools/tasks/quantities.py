"""Numbers in a text, with what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from data_tools.tasks.arithmetic import FUNCTION, TERM, term_value

_BOUND = re.compile(
    r"(?:[<±|]|\b(?:(?:more|less|greater|fewer|bigger|smaller|higher|lower|larger) than(?: or equal to)?|over"
    r"|under|above|below|up to|(?:not|never)(?:\s+(?!but\b)[a-z]+){0,2}|between|minimum of|maximum of)"
    r"|n't(?:\s+(?!but\b)[a-z]+){0,2})$",
    re.IGNORECASE,
)
_OPEN_ENDED = re.compile(
    r"\s*(?:[<±]|\+(?!\s*[\d(])|(?:\w+\s+)?(?:or|and)\s+(?:more|less|fewer|greater|above|up|over|below|higher|lower|larger"
    r"|smaller|beyond)\b|(?:\w+\s+)?at (?:least|most)\b)"
)
# Letters after a number: a unit, or a variable.
_GLUED_UNIT = re.compile(
    r"(?:[kcdmμµn]?m|[kmμµ]?g|[mcdk]?[lL]|[hsdNVAKCFJW]|hrs?|mins?|secs?|ms|ft|in|lbs?|oz|yds?|mi|[km]?ph|[KMGT]i?[bB]"
    r"|[kMG]?Hz|k[WJNPV]a?|[MGk]W|mol|am|pm|a\.m|p\.m|st|nd|rd|th|px|percent|degrees|[A-Za-z]{4,})(?![A-Za-z\d])"
)
_VARIABLE = re.compile(
    rf"\s*(?:\*\s*)?(?:{FUNCTION}(?![a-z])|\\|[(\[{{|√∞]|[xyz]{{2,3}}(?![A-Za-z])|[α-ωΑ-Ω](?<!μ)|(?![mgshlLdNVAKCFJW]|[aI]\s+[a-z])[A-Za-z](?![A-Za-z.']))"
)
_OPERATOR_THEN_VARIABLE = re.compile(
    rf"\s*[-+*/^]\s*[({{]*-?(?:{FUNCTION}(?![a-z])|\\|[A-Za-z](?![A-Za-z])(?!\s+[a-z]{{2}}))"
)
_STOP = frozenset(
    "a an the per every each in for of at on to by from with and or is are was were left more total altogether as so "  # noqa: SIM905
    "that which when if all away remaining he she they it we you i over after before because than".split()
)
_MONTH = re.compile(r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*")
_WORD = re.compile(r"[\s-]*([A-Za-z%][\w%']*)\.?")


@dataclass(frozen=True)
class Quantity:
    """A number as it is written, its value (None for what is no plain number), and the words beside it."""

    text: str
    value: Fraction | None
    start: int
    end: int
    words: frozenset[str] = frozenset()


def equal_numbers(reference: Fraction | None, value: Fraction | None) -> bool:
    if reference is None or value is None:
        return False
    if reference.denominator == value.denominator == 1:
        return reference == value
    return abs(reference - value) <= abs(reference) / 1_000_000


def same_quantity(one: Quantity, other: Quantity) -> bool:
    """Whether two values are equal and the words beside them do not differ: one may have more, or abbreviate them."""
    if not equal_numbers(one.value, other.value):
        return False
    left, right = one.words - other.words, other.words - one.words
    return all(any(_abbreviates(a, b) for b in right) for a in left) or all(
        any(_abbreviates(a, b) for a in left) for b in right
    )


def _abbreviates(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return len(short) < 4 <= len(long) and short[0] == long[0] and re.search(".*".join(short), long) is not None


def quantities_in(text: str) -> list[Quantity]:
    """Return the numbers in a cleaned text of plain terms."""
    return [_quantity(text, match) for match in TERM.finditer(text)]


def _quantity(text: str, match: re.Match[str]) -> Quantity:
    term, start = match[0], match.start()
    before, after = text[:start].rstrip(), text[match.end() :]
    if (
        term[0] in "-+"
        and re.search(r"[\w)]$", before)
        and not re.search(r"\b(?:is|was|be|equals|of|to|exactly|about)$", before)
    ):
        if re.search(rf"(?:^|[^A-Za-z])[A-Za-z]$|[)}}]$|\b{FUNCTION}$|\\\w+$|\d$", before):
            return Quantity(term, None, start, match.end())
        if term[1:2] == " " or before == text[:start]:  # a dash
            term = term[1:].lstrip()
    while term.startswith("(") and term.count("(") > term.count(")"):
        term = term[1:].lstrip()
    while term.endswith(")") and term.count(")") > term.count("("):
        term = term[:-1].rstrip()
    plain = _plain_before(text[:start]) and _plain_after(after)
    return Quantity(term, term_value(term) if plain else None, start, match.end(), _words(text[:start], after))


def _plain_before(before: str) -> bool:
    if re.search(r"[A-Za-zα-ωΑ-Ω\d\\_.]$", before) and not re.search(r"(?:[a-z]\.)$", before):
        return False
    before = before.rstrip(" ({[")
    return not (
        _BOUND.search(before)
        or re.search(
            rf"[*/^_√]$|\b{FUNCTION}$|\\[A-Za-z]+$|[A-Za-z]_\w$|(?:^|[^A-Za-z])[A-Za-z]\s*\+$|\d[.:]$|(?:\\infty|∞|(?:^|[^\w'])[b-hj-z])\s*[,;]$",
            before,
        )
    )


def _plain_after(after: str) -> bool:
    if re.match(r"[A-Za-z]", after):
        rest = rf"{FUNCTION}(?![a-z])|[A-Za-z]\s*[-+*^]\s*[A-Za-z](?![A-Za-z])"
        return _GLUED_UNIT.match(after) is not None and not re.match(rest, after)
    if re.match(
        r"[.,:']\d|'\s*\d|\s*(?:\.{2,}|…)\s*\d|\s*[∪∩]|\s+in\s+\d+\W*$|\s*[,;]\s*-?(?:\\[a-z]|∞|[b-hj-z](?![\w']))|%|\.?\\|_|\s*:\s*\d|\s*\)?\s*[-+*/^]?\s*\\",
        after,
    ) or _OPEN_ENDED.match(after):
        return False
    return not (_VARIABLE.match(after) or _OPERATOR_THEN_VARIABLE.match(after.lstrip(") ")))


def _words(before: str, after: str) -> frozenset[str]:
    """Return the noun phrase after the number, and a capitalised word directly before it."""
    words: list[str] = []
    at = 0
    while (match := _WORD.match(after, at)) and match[1].lower() not in _STOP and len(words) < 3:
        words.append(match[1].lower())
        at = match.end()
        if match[0].endswith("."):
            break
    if (name := re.search(r"([A-Z][a-z]+)\.?\s+$", before)) and (
        _MONTH.match(name[1]) or before[: name.start()].strip() == ""
    ):
        words.append(name[1].lower())
    return nouns(words)


def nouns(words: Iterable[str]) -> frozenset[str]:
    """Return the words that say what is counted, in the singular."""
    small = (word.lower() for word in words)
    return frozenset(
        word[:-1] if len(word) > 2 and word.endswith("s") else word for word in small if word not in _STOP
    )
