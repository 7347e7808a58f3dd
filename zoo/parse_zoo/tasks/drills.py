"""Arithmetic drills: short true equations that teach a small model to calculate before word problems."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from parse_zoo.tasks.arithmetic import evaluate, show, worked_out, write_equation


def equation(rng: Random, max_number: int) -> str:
    """Return one equation, with operands and result at most `max_number`, in a notation of `paraphrase`."""
    kind = rng.choice("++--**//%")
    if kind == "+":
        left = rng.randint(0, max_number)
        right = rng.randint(0, max_number - left)
        result = left + right
    elif kind == "-":
        left = rng.randint(0, max_number)
        right = rng.randint(0, left)
        result = left - right
    elif kind == "%":  # a share written as a decimal: 0.35 * 80
        share, right = rng.choice(range(5, 100, 5)), rng.choice(range(20, max_number + 1, 20))
        result = share * right // 100
        return (
            f"{_decimal(share)} {rng.choice('*x')} {right} = {result}"
            if rng.random() < 0.5
            else f"{right} * {_decimal(share)} = {result}"
        )
    else:  # log-uniform factors: small and large factors are equally frequent
        left = round(max_number ** rng.random())
        right = rng.randint(1, max(1, max_number // left))
        result = left * right
        if kind == "/":
            left, right, result = result, left, right
        elif rng.random() < 0.5:
            left, right = right, left
    sign = rng.choice(
        {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "x", "x", "times"), "/": ("/", "divided by")}[kind]
    )
    return f"{left} {sign} {right} = {result}"


def _decimal(hundredths: int) -> str:
    return show(Fraction(hundredths, 100))


def written_out(rng: Random, max_number: int) -> str:
    """Return one equation with numbers of any length up to `max_number`, worked out in parts."""

    def number(limit: float) -> int:  # log-uniform: all lengths are equally frequent
        return max(1, round(limit ** rng.random()))

    sign = rng.choice("+--**/%")
    left, right = number(max_number), number(max_number)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    elif sign in "*/":
        right = number(max_number // left) if left <= max_number else 1
        if sign == "/":
            left *= right
        elif rng.random() < 0.5:
            left, right = right, left
    terms = [Fraction(left), Fraction(right)]
    if sign == "%":
        share, sign = Fraction(rng.choice(range(5, 100, 5)), 100), "*"
        terms = [share, Fraction(number(max_number / 10) * 20)]
        rng.shuffle(terms)
    symbols = rng.choice(({}, {"*": "x"}, {"*": "times", "+": "plus", "-": "minus", "/": "divided by"}))
    return write_equation([(terms, [sign]), *worked_out(terms[0], sign, terms[1])], evaluate(terms, [sign]), symbols)


def drill(rng: Random, max_number: int = 300, n_equations: int = 6, in_parts: bool = False) -> str:
    """Return `n_equations` equations, one per line."""
    one = written_out if in_parts else equation
    return "\n".join(one(rng, max_number) + "." for _ in range(n_equations))
