"""The final answer is what the last mark with content states."""

from __future__ import annotations

import pytest

from data_tools.tasks.answer_text import clean
from data_tools.tasks.final_answer import final_answer


@pytest.mark.parametrize(
    ("completion", "stated"),
    [
        ("#### B\n\nI hope this helps.", "B"),
        ("#### 72\n####", "72"),
        ("#### 72\n#### \n", "72"),
        ("\\boxed{\\frac{1}{1+\\frac{1}{x}}}", "\\frac{1}{1+\\frac{1}{x}}"),
        ("First \\boxed{1}, so \\boxed{\\frac{a}{1+\\frac{b}{\\sqrt{c}}}}", "\\frac{a}{1+\\frac{b}{\\sqrt{c}}}"),
        ("\\boxed {42}", "42"),
        ("\\boxed{5} and \\boxed{6}", "5, 6"),
        ("\\boxed{5}. Then \\boxed{6}", "6"),
        ("\\boxed{5}, but \\boxed{6", "5"),
        ("\\boxed{5} \\boxed{}", "5"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
        ("\\boxed{\\boxed{7}}", "7"),
        ("#### Step 3: Conclusion\nThe answer is \\boxed{72}.", "72"),
        ("#### 72\n\n#### Verification\nit fits", "72"),
        ("#### 1. Add\nso 5\n#### 7", "7"),
        ("#### The answer is 5", "5"),
        ("#### x > 3\n\nI hope so.", "x > 3"),
        ("#### x > 3\n\nSo it is.", "x > 3"),
        ("**Answer**: B", "B"),
        ("The final answer is\n\n5", "5"),
        ("## Final Answer\n\n**5**", "**5**"),
        ("The answer is 3. No, the answer is 4.", "4."),
        ("The answer is 3.\n#### 4", "4"),
        ("The answer is correct, so 4", None),
        ("nothing", None),
        ("#### Total earnings\nShe earns $18.", None),
        ("#### Overview\n\nThe capital is Paris.", None),
        ("####", None),
    ],
)
def test_the_last_mark_with_content_decides(completion: str, stated: str | None) -> None:
    found = final_answer(completion)
    assert (found.text if found.mark != "none" else None) == stated


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("**12**.", "12"),
        ("1{,}234", "1234"),
        ("10,\\!080", "10080"),
        ("1\\ 234\\ 567", "1234567"),
        ("3\u00a0000", "3000"),
        ("\\text{12 apples}", "12 apples"),
        ("–5", "-5"),
        ("2½", "2 1/2"),
        ("$x$", "x"),
        ("\\$5", "$5"),
        ("$5", "$5"),
        ("\\(x\\)", "x"),
        ("\\textbf{(B)}", "(B)"),
        ("\\dfrac12", "\\frac{1}{2}"),
        ("{1 \\over 2}", "\\frac{1}{2}"),
        ("28\\%", "28%"),
        ("a\n b", "a b"),
        ("“Paris”", "Paris"),
        ("(1,234)", "(1,234)"),
        ("5, 6", "5, 6"),
        ("2*3*4", "2*3*4"),
        ("*so*", "so"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_decoration_is_no_part_of_an_answer(answer: str, text: str) -> None:
    assert clean(answer) == text == clean(clean(answer))
