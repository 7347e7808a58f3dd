"""Numbers are read as a reader would: through notation, but not out of lists, bounds and terms."""

from __future__ import annotations

import pytest

from data_tools.tasks.stated_numbers import same_number, stated_number, stated_quantity

WORDINGS = ("{}", "#### {}", "\\boxed{{{}}}", "The answer is {}.", "The answer is ${}$.")
# A reference, and answers that state it in each of the wordings.
NUMBERS = [
    ("5", "5"),
    ("-5", "- 5"),
    ("-5", "–5"),
    ("-5", "negative 5"),
    ("2.5", "2 1/2"),
    ("0.5", "½"),
    ("2.5", "2½"),
    ("72", "6 * 12, i.e. 72."),
    ("10080", "10,\\!080"),
    ("1234567", "1\\ 234\\ 567"),
    ("3000", "3\u00a0000"),
    ("70000", "70 000"),
    ("5000", "5\\times 10^3"),
    ("5000000", "5 million"),
    ("1024", "2^{10}"),
    ("5", "5kg"),
    ("5", "$x = 5$"),
    ("72", "72 cm²"),
    ("72", "The area is $72\\text{ cm}^2$."),
    ("5", "f(5) = 5"),
    ("30", "30^\\circ"),
    ("28", "28 percent"),
    ("0.00001", "1e-5"),
    ("0.00001", "10^{-5}"),
    ("-2.5", "-2 1/2"),
    ("5", "(5)"),
    ("1500000", "$1.5 million"),
    ("1234.5", "1,234.50 dollars"),
    ("1234567.89", "$1,234,567.89"),
    ("5", "5th"),
    ("5", "5 a day"),
    ("5", "$\\frac{10}{2}$"),
    ("7", "`7`"),
    ("7", "\\mathbf{7}"),
    ("5", "5 hours"),
]
# A reference, and completions that state it.
COMPLETIONS = [
    ("15", "#### 15 = 3 * 5"),
    ("12", "\\boxed{\\text{12 apples}}"),
    ("5", "#### 5 m"),
    ("5", "#### 5m"),
    ("5", "\\boxed{x = 5}"),
    ("72", "So the area is 72 cm²."),
    ("3", "\\boxed{\\log_2 8 = 3}"),
    ("45", "#### $15 for 3 people = $45"),
    ("5.40", "\\boxed{\\$5.40}"),
    ("28", "\\boxed{28\\%}"),
    ("13", "#### 16 eggs - 3 eggs = 13 eggs"),
    ("18", "Janet makes $18 every day at the farmers' market."),
    ("-5", "\\boxed{(-5)}"),
    ("12", "So Tom has 3 apples and Jerry has 12 apples."),
    ("5", "The answer is 5!"),
    ("6", "\\boxed{3!}"),
    ("5", "The answer is: **5**"),
    ("5", "**Answer:** $5"),
    ("5", "The final answer is\n\n5"),
    ("3", "#### 3 feet."),
    ("-5", "The answer is - 5."),
    ("-5", "The answer is -$5"),
    ("12", "#### Total: 12 apples"),
    ("12", "#### Janet has 12 apples"),
    ("18", "**Final Answer**\n\n18"),
    ("72", "The answer is 72. I hope this helps! 5 stars."),
    ("12", "The answer is 12 because 3 * 4 = 12 and 2 + 2 = 4."),
    ("50", "#### 50 cents"),
    ("0.5", "\\boxed{\\frac{1}{2}\\text{ cup}}"),
    ("7", "\\boxed{\\mathrm{7~km}}"),
    ("5", "#### 5\n####"),
    ("5", "#### 5\n#### "),
    ("1072", "#### 1,072"),
    ("1072", "so it is $1,072.00.\n#### $1,072.00"),
    ("25", "#### 25%"),
    ("0.5", "#### 1/2"),
    ("12", "#### 12.0 apples"),
    ("-3", "#### -3"),
    ("18", "The answer is 18."),
    ("18", "\\boxed{18}"),
    ("18", "#### 18 (9 + 9)"),
    ("42", "So:\n- 42"),
    ("-5", "#### -$5"),
    ("\\frac{1}{2}", "It is \\boxed{\\frac{1}{2}}."),
    ("0.5", "\\boxed{\\dfrac{1}{2}}"),
    ("0.5", "\\boxed{\\dfrac12}"),
    ("3.5", "\\boxed{3\\frac{1}{2}}"),
    ("72", "\\boxed{72\\text{ cm}^2}"),
    ("1234", "\\boxed{1{,}234}"),
    ("1500", "#### 1.5e3"),
    ("0.3333333", "#### 1/3"),
    ("72", "#### Step 3: Conclusion\nThe answer is \\boxed{72}."),
    ("72", "#### 72\n\n#### Verification\nit fits"),
    ("72", "#### **72**\nThat was all."),
    ("72", "#### 8 * 9 = 72"),
    ("15", "The answer is $15 for 3 people."),
    ("7", "The answer is 3 + 4 = 7."),
]
# What does not state the number 5.
NOT_FIVE = [
    "5x",
    "5\\pi",
    "\\sqrt{5}",
    "5\\times 10^3",
    "5 million",
    "5, 6",
    "5 or 6",
    "> 5",
    "5y",
    "5 x",
    "5\\sqrt{2}",
    "5π",
    "5√2",
    "5 \\text{ or } 6",
    "5 and 6",
    "5-6",
    "5–6",
    "5 to 6",
    "between 5 and 6",
    "x > 5",
    "x \\ge 5",
    "\\geq 5",
    "≥ 5",
    "< 5",
    "≤5",
    "at least 5",
    "more than 5",
    "less than 5",
    "5+",
    "5 or more",
    "5 \\pm 1",
    "\\pm 5",
    "±5",
    "5^2",
    "5^x",
    "5k",
    "5 thousand",
    "5 billion",
    "x+5",
    "x - 5",
    "5 - x",
    "5/x",
    "x/5",
    "5/6",
    "\\frac{5}{6}",
    "\\frac{5}{x}",
    "5:30",
    "5 feet 6 inches",
    "5 hours and 30 minutes",
    "5 apples, 6 pears",
    "5e3",
    "5e",
    "5i",
    "log 5",
    "\\ln 5",
    "sqrt(5)",
    "5%6",
    "(5, 6)",
    "[5, 6]",
    "\\{5, 6\\}",
    "x = 5, y = 6",
    "x = 5 or x = 6",
    "5 squared",
    "not 5",
    "5x = 10",
    "x_5",
    "5_2",
    "0.5",
    "5.5",
    "-5",
    "5*x",
    "5(x+1)",
    "5 choose 2",
    "5 mod 3",
    "5a",
    "5n+1",
    "\\log_5 2",
    "x^5",
    "x^{5}",
    "5 < x < 6",
    "5 \\cdot 2",
    "1,5",
    "5,6",
    "2/5",
    "-5, 5",
    "5 \\times x",
    "5\\alpha",
    "5\\ldots6",
]
WRONG = [
    ("2", "2^{10}"),
    ("80", "10,\\!080"),
    ("10", "10,\\!080"),
    ("4", "a range of 3-4"),
    ("5", "I think it is 5 or 6."),
    ("6", "I think it is 5 or 6."),
    ("6", "5, 6"),
    ("6", "5 or 6"),
    ("3", "#### 3!"),
    ("12", "\\boxed{(1,2)}"),
    ("3", "#### -3"),
    ("12", "12 apples\n#### 13"),
    ("18", "no number here"),
    ("10", "We saw 10 first, then 7.\n#### 7"),
    ("\\frac{1}{2}", "It is \\boxed{\\frac{3}{2}}."),
    ("12", "\\boxed{(1,2)}"),
    ("1000001", "#### 1000000"),
]


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize(("reference", "answer"), NUMBERS)
def test_a_number_is_the_same_in_any_notation(reference: str, answer: str, wording: str) -> None:
    assert same_number(reference, wording.format(answer)), stated_quantity(wording.format(answer))


@pytest.mark.parametrize(("reference", "completion"), COMPLETIONS)
def test_a_completion_states_its_number(reference: str, completion: str) -> None:
    assert same_number(reference, completion), stated_quantity(completion)


@pytest.mark.parametrize("wording", [*WORDINGS, "So it is {}."])
@pytest.mark.parametrize("answer", NOT_FIVE)
def test_lists_bounds_and_terms_are_no_number(answer: str, wording: str) -> None:
    assert not same_number("5", wording.format(answer)), stated_quantity(wording.format(answer))


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_another_number_is_wrong(reference: str, completion: str) -> None:
    assert not same_number(reference, completion), stated_quantity(completion)


def test_an_exclamation_is_a_factorial_only_in_mathematics() -> None:
    assert stated_number("The answer is 5!") == 5
    assert stated_number("\\boxed{5!}") == stated_number("#### 5!") == stated_number("The answer is $5!$.") == 120


def test_a_number_of_a_billion_digits_is_not_worked_out() -> None:
    assert stated_number("#### 3e9999999999") is None and stated_number("#### 9^(9^(9^9))") is None
    assert same_number("3000", "#### 3e3")


def test_long_texts_take_linear_time() -> None:
    for part in ("1,", "3 * ", "\\boxed{", "#### \n", "\n", " ", "(", "**a", "the answer is "):
        stated_number(part * 20_000)
