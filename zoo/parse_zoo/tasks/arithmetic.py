"""Step-by-step arithmetic: exact equations from an operation to its value, digit by digit."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from parse_infer.errors import ParseError

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_MOST_PARTS = 6
# One side of an equation: terms and the operators between them, or text with spaces around its signs.
Row = tuple[list[Fraction], list[str]] | str


def is_short(value: Fraction) -> bool:
    """Whether `value` has at most two decimals."""
    return (value * 100).denominator == 1


def show(value: Fraction) -> str:
    """Return the decimal notation of `value`; raise ValueError for more than two decimals."""
    if not is_short(value):
        raise ParseError(f"{value} needs more than two decimals")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")


def evaluate(terms: Iterable[Fraction], operators: Iterable[str]) -> Fraction:
    """Return the value of `t0 o0 t1 o1 …` with the usual precedence; raise ZeroDivisionError."""
    terms, operators = list(terms), list(operators)
    while operators:
        at = next((i for i, op in enumerate(operators) if op in "*/"), 0)
        left, right, op = terms[at], terms[at + 1], operators[at]
        terms[at : at + 2] = [_OPERATIONS[op](left, right)]
        del operators[at]
    return terms[0]


def places(value: Fraction) -> list[Fraction]:
    """Return the non-zero place values of a short value, largest first: 305.2 as 300, 5, 0.2."""
    hundredths = str(int(value * 100))
    found = [Fraction(int(digit) * 10**power, 100) for power, digit in enumerate(reversed(hundredths))]
    return [place for place in reversed(found) if place]


def worked_out(left: Fraction, sign: str, right: Fraction) -> list[Row]:
    """Return the rows between `left sign right` and its value, digit by digit; no rows for one part or too many parts.

    A small model cannot reliably carry, borrow or divide within one step, but learns these single-digit steps
    (arXiv 2305.14201 splits products and quotients in the same way):

    - `851 - 252` is `851 - 200 - 50 - 2`, `651 - 50 - 2`, `601 - 2`; sums alike;
    - `27 * 34` is `20 * 30 + 20 * 4 + 7 * 30 + 7 * 4`, `600 + 80 + 210 + 28`, `680 + 210 + 28`, `890 + 28`;
    - `138 / 3` is `40 + (138 - 120) / 3`, `40 + 18 / 3`, `40 + 6`;
    - `875 / 35` is `20 + (875 - 600 - 100) / 35`, `20 + (275 - 100) / 35`, `20 + 175 / 35`, `20 + 5`.
    """
    if left <= 0 or right <= 0 or not (is_short(left) and is_short(right)):
        return []
    if sign in "+-":
        parts = places(right)
        return _one_at_a_time([left, *parts], sign) if 2 <= len(parts) <= _MOST_PARTS and left != right else []
    if any(show(factor).strip("0.") == "1" for factor in (right, left if sign == "*" else right)):
        return []  # a power of ten
    if sign == "/":
        return _quotient(left, right)
    pairs = [(x, y) for x in places(left) for y in places(right)]
    if len(pairs) > _MOST_PARTS:  # split only the factor with fewer digits
        one, other = sorted((left, right), key=lambda factor: len(places(factor)))
        pairs = [(other, y) for y in places(one)]
    values = [x * y for x, y in pairs]
    if not 2 <= len(values) <= _MOST_PARTS or not all(map(is_short, values)):
        return []
    factors = [factor for pair in pairs for factor in pair]
    return [(factors, ["*", *["+", "*"] * (len(values) - 1)]), *_one_at_a_time(values, "+")]


def _quotient(left: Fraction, right: Fraction) -> list[Row]:
    """Return the rows of a long division: per quotient digit, subtract its product digit by digit."""
    quotient, digits = left / right, places(right)
    parts = places(quotient) if is_short(quotient) else []
    if len(digits) > 1:  # a small model does not learn 225 / 25: take five times 25, then the remainder
        alone = len(parts) == 1
        parts = [part for place in parts for part in _easy(place, alone)]
    if not 2 <= len(parts) <= _MOST_PARTS or not all(is_short(part * digit) for part in parts for digit in digits):
        return []
    rows: list[Row] = []
    divided, remaining = show(right), left
    for n, part in enumerate(parts[:-1], 1):
        before = " + ".join(map(show, parts[:n]))
        taken = [part * digit for digit in digits]
        while taken:
            away = " - ".join(map(show, [remaining, *taken]))
            rows.append(f"{before} + ({away}) / {divided}")
            remaining -= taken.pop(0)
        rows.append(f"{before} + {show(remaining)} / {divided}")
    return [*rows, *_one_at_a_time(parts, "+")]


def _easy(place: Fraction, alone: bool) -> list[Fraction]:
    """Split a place value with a digit above five into five and the rest: 70 as 50, 20. `alone`: 4 as 2, 2."""
    unit = place / int(show(place).strip("0."))
    first = 5 * unit if place > 5 * unit else 2 * unit if alone and 2 * unit < place < 5 * unit else place
    return [first, place - first] if first < place else [place]


def _one_at_a_time(terms: list[Fraction], sign: str) -> list[Row]:
    """Return `a + b + c`, then replace `a + b` by its value, down to two terms."""
    rows: list[Row] = []
    while len(terms) > 1:
        rows.append((terms, [sign] * (len(terms) - 1)))
        terms = [_OPERATIONS[sign](terms[0], terms[1]), *terms[2:]]
    return rows


def write_equation(chain: Sequence[Row], value: Fraction, symbols: Mapping[str, str]) -> str:
    """Return `row = row = value`, with the signs replaced by `symbols`."""
    rows = []
    for row in chain:
        if isinstance(row, str):
            rows.append(" ".join(symbols.get(word, word) for word in row.split(" ")))
            continue
        terms, operators = row
        words = [show(terms[0])]
        for op, term in zip(operators, terms[1:], strict=True):
            words += [symbols.get(op, op), show(term)]
        rows.append(" ".join(words))
    return " = ".join([*rows, show(value)])
