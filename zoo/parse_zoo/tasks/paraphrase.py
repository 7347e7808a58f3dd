"""Paraphrase a worked solution without changing its correctness.

Real model pairs differ in wording. `gsm_symbolic` writes all solutions of a template in the same way, so a target and
a draft model trained on them would agree token for token. This module splits a solution into steps (prose, equation,
prose). It rejects the solution unless every equation is true and follows from the question. Then it rewrites the steps
with other operator signs, operand orders, connectives and sentence forms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from parse_zoo.tasks.arithmetic import Row, evaluate, is_short, show, worked_out, write_equation

NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_TOKEN = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"|(?P<unit>/\s*[A-Za-z]+|%)"  # 3 pounds/alpaca, 25%
    r"|(?P<op>[-+*/×÷]|(?<=\s)x(?=\s))"
    r"|(?P<equals>=)"
    r"|(?P<word>[A-Za-z][A-Za-z'-]*)"
    r"|(?P<currency>[$€£])"
    r"|(?P<other>\S)"
)
_OPERATORS = {"×": "*", "x": "*", "÷": "/"}
# Numbers of common knowledge that a question need not state: dozens, days, months, minutes, halves, quarters, percent.
_COMMON = {Fraction(n) for n in (1, 2, 3, 4, 7, 10, 12, 24, 30, 52, 60, 100)} | {
    Fraction(1, 2),
    Fraction(1, 4),
    Fraction(3, 4),
}
_LOWER = {
    "The",
    "He",
    "She",
    "They",
    "There",
    "In",
    "On",
    "If",
    "After",
    "Each",
    "His",
    "Her",
    "It",
    "Of",
    "To",
    "For",
    "Together",
    "From",
    "Out",
}
_CONNECTED = {
    "So",
    "Then",
    "Therefore",
    "Thus",
    "Hence",
    "Finally",
    "Next",
    "First",
    "Now",
    "Altogether",
    "Since",
    "Let",
}


@dataclass(frozen=True)
class Step:
    """One line of a worked solution: `before` + equation + `after`; `terms` and `operators` alternate."""

    before: str
    terms: tuple[Fraction, ...]
    operators: tuple[str, ...]
    value: Fraction
    after: str


def numbers(text: str) -> list[Fraction]:
    """Return every number in `text`, in order."""
    return [Fraction(match.replace(",", "")) for match in NUMBER.findall(text)]


def _read_equation(sentence: str) -> Step | None:
    """Return the only equation of `sentence`, read leftwards from its `=`; None unless there is one true equation."""
    tokens = [(m.lastgroup, m.group(), m.start(), m.end()) for m in _TOKEN.finditer(sentence)]
    equals = [i for i, token in enumerate(tokens) if token[0] == "equals"]
    if len(equals) != 1:
        return None
    right = equals[0] + 1
    while right < len(tokens) and tokens[right][0] == "currency":
        right += 1
    if right >= len(tokens) or tokens[right][0] != "number":
        return None
    terms: list[Fraction] = []
    operators: list[str] = []
    start = None
    i = equals[0] - 1
    while True:
        while i >= 0 and tokens[i][0] in ("word", "unit"):  # units after the operand: "294 pages x 2/3"
            i -= 1
        if i < 0 or tokens[i][0] != "number":
            return None
        terms.insert(0, Fraction(tokens[i][1].replace(",", "")))
        start = tokens[i][2]
        i -= 1
        if i >= 0 and tokens[i][0] == "currency":
            start = tokens[i][2]
            i -= 1
        if i < 0 or tokens[i][0] != "op":
            break
        operators.insert(0, _OPERATORS.get(tokens[i][1], tokens[i][1]))
        i -= 1
    value = Fraction(tokens[right][1].replace(",", ""))
    try:
        if not operators or evaluate(terms, operators) != value:
            return None
    except ZeroDivisionError:
        return None
    after = sentence[tokens[right][3] :].strip().rstrip(".")
    after = after if not after or after[0] in "%,;" else " " + after
    return Step(sentence[:start].strip(), tuple(terms), tuple(operators), value, after)


def read_steps(solution: str, question: str, answer: str) -> list[Step] | None:
    """Split `solution` into steps; None unless each equation is true and derivable, and the last gives `answer`."""
    known = set(numbers(question))
    known |= {value / 100 for value in known} | _COMMON
    steps: list[Step] = []
    for line in solution.split("\n"):
        line = re.sub(r"^\s*(?:[•-]|\d+\.)\s*", "", line)
        if line.startswith("####"):
            break
        for sentence in re.split(r"(?<=[a-z0-9])\.\s+(?=[A-Z])", line):
            if "=" not in sentence:
                continue
            step = _read_equation(sentence)
            if step is None or any(term not in known for term in step.terms):
                return None
            known.add(step.value)
            steps.append(step)
    if not steps or steps[-1].value != Fraction(answer.replace(",", "")):
        return None
    return steps


def reduction(step: Step, rng: Random, limit: Fraction | None) -> list[tuple[list[Fraction], list[str]]] | None:
    """Work out the expression one operation at a time: `5 + 2 * 14`, `5 + 28`; commutative parts in random order.

    Tries several orders and returns the first order in which every intermediate value is a short decimal within
    `limit`, or None.
    """
    for _ in range(6):
        terms, operators = list(step.terms), list(step.operators)
        if set(operators) <= {"+"} or set(operators) <= {"*"}:
            rng.shuffle(terms)
        elif set(operators) <= {"*", "/"}:  # a * b / c: divide first where the result stays short
            factors = [(Fraction(1), terms[0])] + [
                (1 if op == "*" else -1, term) for op, term in zip(operators, terms[1:], strict=True)
            ]
            head, tail = factors[0], factors[1:]
            rng.shuffle(tail)
            multipliers = [head] + [f for f in tail if f[0] == 1]
            rng.shuffle(multipliers)
            ordered = [multipliers[0]] + [f for f in tail if f[0] == -1] + multipliers[1:]
            terms = [f[1] for f in ordered]
            operators = ["*" if f[0] == 1 else "/" for f in ordered[1:]]
        elif operators[0] in "+*" and rng.random() < 0.5 and (operators[0] == "*" or set(operators) <= {"+", "-"}):
            terms[0], terms[1] = terms[1], terms[0]
        chain = [(list(terms), list(operators))]
        while len(operators) > 1:
            at = next((i for i, op in enumerate(operators) if op in "*/"), 0)
            terms[at : at + 2] = [evaluate(terms[at : at + 2], operators[at : at + 1])]
            del operators[at]
            chain.append((list(terms), list(operators)))
        values = [term for row, _ in chain for term in row]
        if all(is_short(v) and v >= 0 and (limit is None or v <= limit) for v in values):
            return chain
    return None


_SYMBOLS = ({"*": "*"}, {"*": "x"}, {"*": "x"}, {"*": "times", "+": "plus", "-": "minus", "/": "divided by"})
_FIRST = ("", "", "First, ", "To start, ", "We begin: ")
_MIDDLE = ("", "", "Then ", "Next, ", "After that, ", "Now ")
_LAST = ("", "", "So ", "Finally, ", "Therefore, ", "In the end, ")
_LEAD = ("we get ", "we have ", "compute ", "this gives ", "work out ")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def write(
    steps: list[Step], answer: str, rng: Random, limit: float | None = None, in_parts: bool = False
) -> str | None:
    """Return a solution in a wording drawn from `rng`, ending in `#### answer`; None if a value exceeds `limit`.

    With `in_parts`, `worked_out` works out sums, differences, products and quotients digit by digit.
    """
    symbols = rng.choice(_SYMBOLS)
    bound = None if limit is None else Fraction(limit)
    lines = []
    for i, step in enumerate(steps):
        chain = reduction(step, rng, bound)
        if chain is None or not is_short(step.value) or (bound is not None and step.value > bound):
            return None
        rows: list[Row] = [*chain]
        if in_parts:
            for terms, operators in chain[:-1]:  # part of a longer expression: a separate equation before it
                at = next((i for i, op in enumerate(operators) if op in "*/"), 0)
                left, sign, right = terms[at], operators[at], terms[at + 1]
                if parts := worked_out(left, sign, right):
                    value = evaluate([left, right], [sign])
                    lines.append(write_equation([([left, right], [sign]), *parts], value, symbols) + ".")
            (left, right), (sign,) = chain[-1]
            rows += worked_out(left, sign, right)
        equation = write_equation(rows, step.value, symbols)
        connective = rng.choice(_FIRST if i == 0 else _LAST if i == len(steps) - 1 else _MIDDLE)
        form = rng.random()
        first_word = step.before.split(" ")[0].rstrip(",:") if step.before else ""
        if form < 0.4 and step.before:
            if first_word in _CONNECTED or (connective and first_word not in _LOWER):
                connective = "" if first_word in _CONNECTED else connective
                line = connective + step.before
            else:
                line = _capital(connective + (step.before[0].lower() + step.before[1:] if connective else step.before))
            line = f"{line} {equation}{step.after}."
        elif form < 0.7:
            line = _capital(f"{connective}{equation}{step.after}.")
        else:
            line = _capital(f"{connective}{rng.choice(_LEAD)}{equation}{step.after}.")
        if rng.random() < 0.12:
            line += f" {rng.choice(('That is', 'That makes', 'The result is'))} {show(step.value)}."
        lines.append(line)
    return "\n".join([*lines, f"#### {answer}"])
