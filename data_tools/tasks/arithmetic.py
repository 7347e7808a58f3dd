"""Arithmetic in answers: LaTeX and words rewritten as plain signs, and exact values of terms."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?!?"
_OPEN = r"(?:[-+(]\s*)*"
TERM = re.compile(rf"{_OPEN}{_NUMBER}(?:\s*\))*(?:\s*(?:\*\*?|[-+/^])\s*{_OPEN}{_NUMBER}(?:\s*\))*)*")
FUNCTION = r"(?:sqrt|cbrt|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arc[a-z]+|pi|theta|choose|mod)"

_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "million": 6,
    "mio": 6,
    "crore": 7,
    "billion": 9,
    "bn": 9,
    "mn": 6,
    "trillion": 12,
}
_SCALE_LETTERS = {"k": 3, "K": 3, "M": 6, "B": 9}
_SCALED = re.compile(rf"(?<=[\d)])(?:\s*((?i:{'|'.join(_SCALES)}))s?|({'|'.join(_SCALE_LETTERS)}))\b")
_SUPERSCRIPTS = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<=\d)\s+and\s+(?:a|one)[ -]half\b", " 1/2"),
        (r"(?<=\d)\s+and\s+(?:a|one)[ -]quarter\b", " 1/4"),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![a-z])\s*\}?|\\degree(?![a-z])|°", " degrees "),
        (r"(?<![\d./])(\d+)\s+(?:and\s+)?(\d+)\s*/\s*(\d+)(?![\d.])", r"(\1+\2/\3)"),  # mixed numbers
        (r"(?<![\d.])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"(\1+\2/\3)"),
        (r"\\(?:times|cdot|ast)(?![a-z])|[×·⋅∗]|(?<=\d)\s+(?:times|multiplied by)\s+(?=\d)", "*"),
        (r"\\div(?![a-z])|÷|(?<=\d)\s+divided by\s+(?=\d)", "/"),
        (r"(?<=\d)\s*[xX]\s*(?=\d)", "*"),
        (r"(?<=\d) squared\b", "^2"),
        (r"(?<=\d) cubed\b", "^3"),
        (r"(?<=\d) factorial\b", "!"),
        (r"(?<=\d) to the (?:power (?:of )?)?(\d+)(?:th power)?\b", r"^\1"),
        (r"[<>]=|=?/=|<>|\\not\s*=", "<"),
        (r"\\(?:le|leq|leqslant|lt|ge|geq|geqslant|gt|ne|neq)(?![a-z])|[≤≥≠≦≧>]|!=", "<"),
        (r"\\(?:approx|sim|simeq|equiv|cong|Rightarrow|implies|to|rightarrow)(?![a-z])|[≈≃≅≡~⇒→]|=<|-<", "="),
        (r"\\(?:pm|mp)(?![a-z])|\+/-|\+-", "±"),
        (r"\\pi(?![a-z])|π", " pi "),
        (r"\\sqrt\s*\{([^{}]*)\}", r" sqrt(\1)"),
        (r"\\(sqrt|log|ln|lg|exp|sin|cos|tan)(?![a-z])", r" \1 "),
        (r"[√∛∜]", " sqrt "),
        (r"\b(?:[Nn]egative|[Mm]inus)\s+(?=[$€£¥₹\d.(])", "-"),
        (r"(?:\b(?:US|A|C|NZ))?[$€£¥₹]\s*", ""),
        (r"\b(?:USD|EUR|GBP|INR|Rs)\.?\s*(?=[-\d.])", ""),
        (r"\s*%(?!\s*\d|[A-Za-z])|\bper ?cent\b|\bpct\b", " percent"),
        # The power of a unit is no number of its own.
        (rf"(\b(?!{FUNCTION}\b)(?:[A-Za-z]{{2,}}|m))\s*\^\(?-?\d\)?", r"\1"),
    )
)
_POWER = re.compile(r"\^\s*\{([^{}]*)\}")

_Operation = Callable[[Any, Any], Fraction]
_MAX_BITS = 4096


def plain_terms(text: str) -> str:
    """Rewrite fractions, powers, signs and words of scale in a cleaned answer with `+ - * / ^ < = ±`."""
    text = _SUPERSCRIPTS.sub(lambda match: f"^({match[0].translate(_DIGITS)})", text)
    for _ in range(4):  # nested
        text = _POWER.sub(r"^(\1)", text)
    for pattern, plain in _REWRITES:
        text = pattern.sub(plain, text)
    for _ in range(4):
        text = _FRACTION.sub(r"((\1)/(\2))", text)
    for _ in range(3):  # hundred thousand
        text = _SCALED.sub(lambda match: f"*10^{_scale(match)}", text)
    return text


def _scale(match: re.Match[str]) -> int:
    return _SCALES[match[1].lower()] if match[1] else _SCALE_LETTERS[match[2]]


def term_value(term: str) -> Fraction | None:
    """Return the exact value of a term of numbers; None for one that is not complete, or too large to work out."""
    numbers: list[str] = []

    def name(match: re.Match[str]) -> str:
        numbers.append(match[0])
        return f"n{len(numbers) - 1}"

    source = re.sub(_NUMBER, name, term).replace("^", "**").replace("--", "- -")
    try:
        return _value(ast.parse(source.strip(), mode="eval").body, numbers)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _value(node: ast.expr, numbers: list[str]) -> Fraction:
    if isinstance(node, ast.Name):
        text = numbers[int(node.id[1:])]
        return Fraction(_factorial(text[:-1])) if text.endswith("!") else Fraction(text)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ArithmeticError(f"no arithmetic: {ast.dump(node)}")


def _factorial(number: str) -> int:
    if not number.isdigit() or int(number) > 200:
        raise ArithmeticError(f"no factorial of {number}")
    return math.factorial(int(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > _MAX_BITS:
        raise ArithmeticError(f"no exact power {exponent}")
    return Fraction(base) ** int(exponent)


_OPERATIONS: dict[type[ast.operator], _Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}
