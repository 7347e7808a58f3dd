"""Arithmetic drills: short true equations that teach a small model to calculate before it meets word problems."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from data_tools.tasks.wording import show


def equation(rng: Random, max_number: int) -> str:
    """One equation with operands and result of at most `max_number`, in a notation of `data_tools.tasks.wording`."""
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
    else:  # log-uniform factors: small tables as often as long ones
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


def drill(rng: Random, max_number: int = 300, n_equations: int = 6) -> str:
    """`n_equations` equations, one a line."""
    return "\n".join(equation(rng, max_number) + "." for _ in range(n_equations))
