"""Equality of mathematical answers."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from data_tools.tasks.answer_text import clean
from data_tools.tasks.final_answer import FinalAnswer, final_answer, first_clause
from data_tools.tasks.quantities import same_quantity
from data_tools.tasks.stated_numbers import read_quantity, stated_quantity
from parse_infer.errors import ParseError
from parse_infer.optional_dependencies import missing_package

_CHILD = Path(__file__).with_name("expression_child.py")
_MATH = re.compile(r"\$\$(.+?)\$\$|\$((?:\\\$|[^$\n])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?:\b(?!(?:or|and)\b)[A-Za-z]{2,}\b\W+){2}|\b(?:is|are|gives|equals|get|becomes)\b")
_TAIL = re.compile(r".*(?:\b(?:is|are|gives|equals|get|becomes|be)\b:?|:)\s*", re.DOTALL)
_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"\\?%|\b(?:percent|per cent)\b|[$€£¥₹]|\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°|\\degree(?![a-z])", ""),
        (r"\*\*", "^"),
        (r"×|⋅|·", r"\\cdot "),
        (r"÷", "/"),
        (r"≤|<=|\\leq(?:slant)?(?![a-z])", r"\\le "),
        (r"≥|>=|\\geq(?:slant)?(?![a-z])", r"\\ge "),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"≠|!=", r"\\ne "),
        (r"±", r"\\pm "),
        (r"π|(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"∞|(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"∪|(?<![\\A-Za-z])U(?=\s*[(\[])", r"\\cup "),
        (r"∩", r"\\cap "),
        (r"∈", r"\\in "),
        (r"∅", r"\\emptyset "),
        (r"√\s*\(([^()]*)\)|(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan|exp)(?![A-Za-z])", r"\\\1"),
        (r"(\d(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}"),
    )
)
_LESS = {"\\ge": "\\le", ">": "<"}
_FALLING = re.compile(r"([^<>,]+?)\s*(\\ge|>)\s*([A-Za-z])\s*(\\ge|>)\s*([^<>,]+)")
_OUTSIDE = re.compile(r"([A-Za-z])\s*(\\le|<)\s*([^<>,]+?)\s*,?\s*\bor\b\s*\1\s*(\\ge|>)\s*([^<>,]+)")
_SUPERSCRIPTS = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_UNIT = re.compile(
    r"(?:(?<=[\d})])\s*|(?<=\\pi)\s+)(?:(?!(?:sqrt|log|ln|sin|cos|tan|exp|pi)\b)(?:[A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*|[kcm]m|kg|ft|mi)"
    r"(?:\s*\^\s*\{?\d\}?)?|m\s*\^\s*\{?[23]\}?)$"
)


def same_expression(reference: str, completion: str) -> bool:
    """Whether the final answers are equal: numbers by value, words by text, else expressions by math-verify.

    math-verify runs in a process of its own, so its limit of 5 seconds of CPU time holds in every thread. Comparisons
    that take longer count as different. Raises ValueError without the package math-verify.
    """
    require_math_verify()
    expected, answer = _stated(reference), _stated(completion)
    one, other = clean(expected.text), clean(answer.text)
    if not one or not other:
        return False
    if one == other or one.replace(" ", "") == other.replace(" ", ""):
        return True
    first = read_quantity(expected)
    second = stated_quantity(completion) if answer.mark == "none" else read_quantity(answer)
    if first and second and first.value is not None and second.value is not None:
        return same_quantity(first, second)
    letters = [re.fullmatch(r"\(?([A-Z])\)?", text) for text in (one, other)]
    if letters[0] and letters[1]:
        return letters[0][1] == letters[1][1]
    if _are_words(expected.text, one) or _are_words(answer.text, other):
        return one.casefold() == other.casefold()
    bases = [re.search(r"(?<=\d)_\{?(\d+)\}?$", text) for text in (one, other)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:  # math-verify ignores them
        return False
    return _COMPARISONS.equal(_latex(one), _latex(other))


def _stated(completion: str) -> FinalAnswer:
    """Return the final answer, of a sentence the mathematics in it."""
    answer = final_answer(completion)
    if answer.mark in ("hashes", "box"):
        return answer
    text = first_clause(answer.text) if answer.mark == "cue" else completion.strip().rpartition("\n")[2]
    if found := list(_MATH.finditer(text)):
        if answer.mark == "cue" or _PROSE.search(_MATH.sub(" ", text)):
            one = found[0] if answer.mark == "cue" else found[-1]
            return FinalAnswer(one[0], "box")
        return FinalAnswer(text, "box")
    if answer.mark == "cue":
        return FinalAnswer(text, "cue")
    return FinalAnswer(_TAIL.sub("", text), "none") if _PROSE.search(text) else FinalAnswer(text, "box")


def _are_words(written: str, cleaned: str) -> bool:
    """Whether an answer is made of words alone, which the parser would read as products of letters."""
    if re.fullmatch(r"\W*\\(?:text|mbox)[a-z]*\{[^{}\d\\]{2,}\}\W*", written):
        return True
    words = r"[^\W\d_]{3,}(?:[\s,'-]+[^\W\d_]+)*|[^\W\d_]+(?:[\s,'-]+[^\W\d_]{2,})+"
    return re.fullmatch(words, cleaned) is not None


def _latex(text: str) -> str:
    """Return an answer as LaTeX that math-verify reads, with inequalities in one order and outer ranges as a union."""
    text = _SUPERSCRIPTS.sub(lambda found: f"^{{{found[0].translate(_DIGITS)}}}", _UNIT.sub("", text))
    for pattern, latex in _LATEX:
        text = pattern.sub(latex, text)
    if falling := _FALLING.fullmatch(text.strip()):
        high, first, name, second, low = falling.groups()
        text = f"{low} {_LESS[second]} {name} {_LESS[first]} {high}"
    if outside := _OUTSIDE.fullmatch(text.strip()):
        _, less, low, more, high = outside.groups()
        ends = ")" if less == "<" else "]", "(" if more == ">" else "["
        text = f"(-\\infty, {low}{ends[0]} \\cup {ends[1]}{high}, \\infty)"
    return re.sub(r"\s*,?\s*\b(?:or|and)\b\s*", ", ", text).strip()


def require_math_verify() -> None:
    """Raise ValueError without the package math-verify."""
    if find_spec("math_verify") is None:
        raise ParseError(f"the check math: {missing_package(ModuleNotFoundError(name='math_verify'))}")


class _Comparisons:
    """A process that compares expressions: started once, and again after a comparison that took too long."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, reference: str, answer: str) -> bool:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps([reference, answer]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                reply = ""
            except BaseException:  # the reply would be taken for that of the next pair
                self.stop()
                raise
            if not reply:
                self.stop()
            return reply == "true\n"

    def _start(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C ends the command, and the end of the input ends this process.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self._process = process
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            self.stop()
            raise ParseError(f"the check math: math-verify does not start; `{sys.executable} {_CHILD}` shows why")
        return process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_COMPARISONS = _Comparisons()
atexit.register(lambda: _COMPARISONS.stop())


def _after_fork() -> None:
    global _COMPARISONS
    _COMPARISONS = _Comparisons()  # the process belongs to the parent


os.register_at_fork(after_in_child=_after_fork)
