"""Wording changes how a worked answer reads and never what it says."""

from __future__ import annotations

import re
from fractions import Fraction
from random import Random

import pytest

from data_tools.tasks.registry import load_task
from parse_zoo.tasks.arithmetic import evaluate
from parse_zoo.tasks.drills import equation, written_out
from parse_zoo.tasks.paraphrase import NUMBER, Step, numbers, read_steps, reduction, write

QUESTION = (
    "A hall has 5 rows of 12 seats and 7 more seats at the side. 9 people come for each seat. How many people come?"
)
SOLUTION = (
    "There are 5 * 12 = 60 seats in rows.\nIn total there are 60 + 7 = 67 seats.\n"
    "So 67 x 9 = 603 people come.\n#### 603"
)


def equations(text: str) -> list[str]:
    """Every `a op b … = c` of a worked answer, with words turned back into signs."""
    for word, sign in (("plus", "+"), ("minus", "-"), ("times", "*"), ("divided by", "/"), (" x ", " * ")):
        text = text.replace(word, sign)
    return re.findall(r"\(?[\d.]+(?: [-+*/=] \(?[\d.]+\)?)+", text)


def holds(chain: str) -> bool:
    """By Python's own arithmetic, on fractions."""
    sides = [re.sub(r"\d+(?:\.\d+)?", r"Fraction('\g<0>')", side.rstrip(".")) for side in chain.split(" = ")]
    return len({eval(side, {"Fraction": Fraction}) for side in sides}) == 1


def test_every_wording_states_true_equations_and_the_same_answer():
    steps = read_steps(SOLUTION, QUESTION, "603")
    assert [str(step.value) for step in steps] == ["60", "67", "603"]
    wordings = {write(steps, "603", Random(seed)) for seed in range(50)}
    assert len(wordings) > 40, "wordings hardly vary"
    for text in wordings:
        assert text.endswith("\n#### 603")
        found = equations(text)
        assert len(found) == 3, text
        assert all(holds(chain) for chain in found), text


@pytest.mark.parametrize(
    ("solution", "why"),
    [
        (SOLUTION.replace("67 seats", "68 seats"), "an equation is false"),
        (SOLUTION.replace("5 * 12 = 60", "15 * 4 = 60"), "15 is not in the question"),
        (SOLUTION.replace("67 x 9 = 603", "67 + 9 = 76"), "the last equation is not the answer"),
        ("No equation at all.\n#### 603", "nothing to word"),
        (SOLUTION.replace("5 * 12 = 60", "60 = 60"), "an equation without an operation"),
    ],
)
def test_a_solution_that_cannot_be_trusted_is_refused(solution, why):
    assert read_steps(solution, QUESTION, "603") is None, why


def test_chains_are_worked_out_one_operation_at_a_time():
    steps = read_steps("It is 5 + 2 * 14 = 33.\n#### 33", "5 and 2 and 14", "33")
    chain = reduction(steps[0], Random(0), None)
    assert [len(operators) for _, operators in chain] == [2, 1]
    assert all(evaluate(*row) == 33 for row in chain)


def test_a_bound_on_numbers_holds_for_every_intermediate_value():
    steps = read_steps(SOLUTION, QUESTION, "603")
    assert write(steps, "603", Random(0), limit=300) is None
    assert write(steps, "603", Random(0), limit=603) is not None


def test_generated_worked_answers_hold_and_stay_within_the_bound():
    task = load_task("gsm_symbolic", max_number=300)
    for problem in task.problems("train", seed=3, limit=300):
        assert task.check(problem, problem.solution), problem
        assert all(value <= 300 for value in numbers(problem.prompt + problem.solution)), problem
        for chain in equations(problem.solution):
            assert holds(chain), (chain, problem.solution)


def test_drills_are_true():
    rng = Random(0)
    for _ in range(500):
        text = equation(rng, 300)
        assert all(Fraction(n) <= 300 for n in NUMBER.findall(text)), text
        assert equations(text) == [
            text.replace("plus", "+")
            .replace("minus", "-")
            .replace("times", "*")
            .replace("divided by", "/")
            .replace(" x ", " * ")
        ]
        assert holds(equations(text)[0]), text


def test_arithmetic_is_worked_out_in_parts_and_stays_true():
    def texts(*terms: str, sign: str = "*") -> set[str]:
        values, signs = tuple(map(Fraction, terms)), (sign,) * (len(terms) - 1)
        step = Step("", values, signs, evaluate(values, signs), "")
        return {text for seed in range(40) if (text := write([step], "0", Random(seed), in_parts=True))}

    assert any("8 * 75 = 8 * 70 + 8 * 5 = 560 + 40 = 600" in text for text in texts("8", "75"))
    four = "27 * 34 = 20 * 30 + 20 * 4 + 7 * 30 + 7 * 4 = 600 + 80 + 210 + 28 = 680 + 210 + 28 = 890 + 28 = 918"
    assert any(four in text for text in texts("27", "34"))
    assert any("0.75 * 60 = 0.7 * 60 + 0.05 * 60 = 42 + 3 = 45" in text for text in texts("0.75", "60"))
    long = "138 / 3 = 40 + (138 - 120) / 3 = 40 + 18 / 3 = 40 + 6 = 46"
    assert any(long in text for text in texts("138", "3", sign="/"))
    before = [text for text in texts("138", "3", "2", sign="/") if f"{long}.\n" in text]
    assert before and all("138 / 3 / 2 = 46 / 2 = 20 + (46 - 40) / 2 = 20 + 6 / 2 = 20 + 3 = 23" in t for t in before)
    longer = (
        "830 / 2 = 400 + (830 - 800) / 2 = 400 + 30 / 2 = 400 + 10 + (30 - 20) / 2 = 400 + 10 + 10 / 2 = 400 + 10 + 5"
    )
    assert any(longer in text for text in texts("830", "2", sign="/"))
    assert any(
        "851 - 252 = 851 - 200 - 50 - 2 = 651 - 50 - 2 = 601 - 2 = 599" in t for t in texts("851", "252", sign="-")
    )
    sums = "295 + 133 = 295 + 100 + 30 + 3 = 395 + 30 + 3 = 425 + 3 = 428"
    assert any(sums in text for text in texts("295", "133", sign="+"))
    two = "875 / 35 = 20 + (875 - 600 - 100) / 35 = 20 + (275 - 100) / 35 = 20 + 175 / 35 = 20 + 5 = 25"
    assert any(two in text for text in texts("875", "35", sign="/"))
    fives = "225 / 25 = 5 + (225 - 100 - 25) / 25 = 5 + (125 - 25) / 25 = 5 + 100 / 25 = 5 + 4 = 9"
    assert any(fives in text for text in texts("225", "25", sign="/"))
    assert any("825 / 275 = 2 + (825 - 400 - 140 - 10) / 275 = " in text for text in texts("825", "275", sign="/"))
    assert any("= 50 + 20 + 1 = 70 + 1 = 71" in text for text in texts("852", "12", sign="/"))
    words = "851 minus 252 = 851 minus 200 minus 50 minus 2 = "
    assert any(words in text for text in texts("851", "252", sign="-"))
    three = "123 * 345 = 345 * 100 + 345 * 20 + 345 * 3 = 34500 + 6900 + 1035"
    assert any(three in text for text in texts("345", "123")), "nine parts are too many"
    assert not any(text.count("=") > 1 for text in texts("851", "50", sign="-")), "one digit is taken away at once"
    for short in ("7", "30"), ("46", "1"), ("0.1", "45"):
        assert not any("+" in text or "plus" in text for text in texts(*short)), f"{short} needs no parts"
    for text in (*texts("12", "34", "56"), *texts("3360", "60", sign="/"), *texts("90.5", "1.25", sign="-")):
        assert all(holds(line) for line in equations(text)), text


def test_drills_in_parts_are_true():
    rng = Random(0)
    for _ in range(500):
        text = written_out(rng, 10000)
        found = equations(text)
        assert len(found) == 1 and holds(found[0]), text
