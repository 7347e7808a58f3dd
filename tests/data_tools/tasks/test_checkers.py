"""Texts are compared by the answers that they state."""

from __future__ import annotations

import pytest

from data_tools.tasks.checkers import CHECKS, answer_line, same_answer

SAME = [
    ("x=5, y=6", "x = 5, y = 6"),
    ("\\text{Yes}", "Yes"),
    ("\\boxed{\\text{Yes}}", "#### Yes"),
    ("yes", "The answer is **Yes**."),
    ("$1.5 million", "1500000"),
    ("5 km", "5 kilometers"),
    ("#### 5 hours", "#### 5 hrs"),
    ("18 dollars", "$18"),
    ("72 cm²", "72 square centimeters"),
    ("#### 72", "So:\n#### $72.00"),
    ("It is \\boxed{72 apples}", "#### 72 (8 * 9)"),
    ("So 18 apples.", "She has 18"),
    ("The answer is 1/2.", "\\boxed{\\frac{1}{2}}"),
    ("\\boxed{0.5}", "#### 50/100"),
    ("11 September", "11 September."),
    ("B", "#### (B)"),
    ("(B) Vitamin A", "(B) Vitamin A."),
    ("\\boxed{10,\\!080}", "#### 10080"),
    ("The answer is 5 km per hour", "#### 5"),
    ("Janet makes $18 every day.", "She makes 18 dollars per day."),
    ("\\boxed{2x}", "#### $2x$"),
    ("\\boxed{\\text{No solution}}", "The answer is no solution."),
    ("#### 72", "So:\n#### $72.00"),
    ("It is \\boxed{72 apples}", "#### 72 (8 * 9)"),
    ("So 18 apples.", "She has 18"),
    ("#### blue", "It is\n#### blue"),
    ("**Answer:** 18", "The answer is $18$."),
    ("\\boxed{\\$15}", "#### 15"),
    ("The answer is Paris.", "#### **Paris**"),
    ("The answer is (B).", "**Answer: B) 12 cm**"),
    ("\\boxed{\\text{B}}", "#### B"),
]
OTHER = [
    ("#### blue", "#### red"),
    ("\\boxed{x^2+3}", "\\boxed{y-3}"),
    ("\\boxed{x+3}", "\\boxed{y+3}"),
    ("#### Step 3\nThe answer is \\boxed{7}", "#### Step 3\nThe answer is \\boxed{9}"),
    ("The answer is 11:30", "The answer is 12:30"),
    ("\\boxed{1{,}234}", "\\boxed{9{,}234}"),
    ("no number", "#### 3"),
    ("The answer is:\n\n**18**", "The answer is:\n\n**20**"),
    ("The answer is B) 12 cm", "The answer is C) 12 cm"),
    ("The answer is A dog", "The answer is A cat"),
    ("The answer is (A) and (B)", "The answer is (A) and (C)"),
    ("B. by far", "#### B"),
    ("3!", "3"),
    ("The answer is 3!.", "The answer is 3."),
    ("So it is $x = 5, y = 6$.", "So it is $x = 7, y = 6$."),
    ("He left on September 11.", "He left on October 11."),
    ("He left on 11 September.", "He left on 11 October."),
    ("#### Total earnings\nShe earns $18.", "#### Total earnings\nShe earns $20."),
    ("I hope this helps!", "Let me know!"),
    ("A line.\nI hope this helps!", "Another.\nI hope this helps!"),
]
OTHER_IN_ANY_WORDING = [
    ("x = 5, y = 6", "x = 7, y = 6"),
    ("2x", "2y"),
    ("$1.5 million", "$1.5 billion"),
    ("11 September", "11 October"),
    ("September 11", "October 11"),
    ("5 km", "5 miles"),
    ("5 km", "5 m"),
    ("5 kg", "5 g"),
    ("3 pm", "3 am"),
    ("2x + 1", "2y + 1"),
    ("5x", "5"),
    ("\\sqrt{2}", "\\sqrt{3}"),
    ("\\sqrt{2}", "2"),
    ("2^3", "2^4"),
    ("5, 6", "7, 6"),
    ("5 or 6", "5 or 7"),
    ("Yes", "No"),
    ("\\text{Yes}", "\\text{No}"),
    ("5 thousand", "5 million"),
    ("Monday 5", "Tuesday 5"),
    ("Room 5", "Gate 5"),
    ("> 5", "< 5"),
    ("> 5", "5"),
    ("5 years", "5 months"),
    ("x = 5", "x = 6"),
    ("10:30", "11:30"),
    ("\\frac{x}{2}", "\\frac{y}{2}"),
    ("3\\pi", "3"),
    ("a_1", "a_2"),
    ("(1, 2)", "(1, 3)"),
    ("(2, 1)", "(1, 2)"),
    ("x^2", "x^3"),
    ("5 million dollars", "5 million euros"),
    ("May 5, 2020", "May 6, 2020"),
    ("12 hours and 30 minutes", "12 hours and 45 minutes"),
    ("5 feet 6 inches", "5 feet 7 inches"),
    ("5:6", "5:7"),
    ("first", "second"),
    ("B", "C"),
]
EXACT = [
    ("Paris", "The answer is Paris."),
    ("Paris", "Paris."),
    ("Paris", "**Paris**"),
    ("Paris", "The answer is: **Paris**"),
    ("Paris", "\\boxed{\\text{Paris}}"),
    ("Paris", "#### Paris\n\nI hope this helps."),
    ("Paris", "#### Paris\nIt is the capital of France."),
    ("Paris", "#### **Paris**\n####"),
    ("Paris", "Let me see.\nParis"),
    ("Paris", '"Paris"'),
    ("Paris", "The answer is Paris because it is the capital."),
    ("Paris", "The answer is Paris. It is the capital."),
    ("Paris", "**Final Answer**\n\nParis"),
    ("Paris.", "Paris"),
    ("New York", "New\u00a0York"),
    ("St. Louis", "The answer is St. Louis."),
    ("U.S.", "The answer is U.S."),
    ("no", " no\n"),
    ("Paris", "#### Step 1\nLook.\n#### Paris"),
    ("1072", "#### 1,072"),
    ("a\nb", "a\nb"),
]
NOT_EXACT = [
    ("Paris", "Rome"),
    ("Paris", "The answer is not Paris."),
    ("Paris", "paris"),
    ("Paris", "Paris or Rome"),
    ("Paris", "I like Paris"),
    ("Paris", ""),
    ("b", "a b"),
    ("a\nb", "c\nb"),
    ("!", "?"),
    ("Paris", "The answer is Paris, Texas."),
]
WORDINGS = ("{}", "#### {}", "\\boxed{{{}}}", "The answer is {}.", "So:\n#### {}")


def agree(one: str, other: str) -> set[bool]:
    """What `same_answer` says in both orders, and of the lines that stand for the answers."""
    pairs = [(one, other), (other, one), (answer_line(one), other), (one, answer_line(other))]
    return {same_answer(*pair) for pair in pairs}


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_answer_in_other_words(one: str, other: str) -> None:
    assert agree(one, other) == {True} and "\n" not in answer_line(one) + answer_line(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_answer(one: str, other: str) -> None:
    assert agree(one, other) == {False}


@pytest.mark.parametrize(("one", "other"), OTHER_IN_ANY_WORDING)
def test_another_answer_in_the_same_words(one: str, other: str) -> None:
    for wording in WORDINGS:
        assert agree(wording.format(one), wording.format(other)) == {False}, wording
        assert agree(wording.format(one), wording.format(one)) == {True}, wording


def test_an_endless_run_of_spaces_is_read_once() -> None:
    """A pattern that begins anew at each of them would take hours."""
    for run in (" " * 20_000, "\n" * 20_000, " ," * 10_000):
        answer = f"The answer is 5{run}because of"
        assert same_answer(answer, "#### 5") and not CHECKS["exact"]("6", answer)


@pytest.mark.parametrize(("reference", "completion"), EXACT)
def test_a_text_is_exact_without_its_decoration(reference: str, completion: str) -> None:
    assert CHECKS["exact"](reference, completion)


@pytest.mark.parametrize(("reference", "completion"), NOT_EXACT)
def test_another_text_is_not_exact(reference: str, completion: str) -> None:
    assert not CHECKS["exact"](reference, completion)
