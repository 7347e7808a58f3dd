"""Checks of the final answer in a completion.

Each check finds the answer (`final_answer`), cleans it like the reference (`answer_text`), and compares by kind:
numbers (`stated_numbers`), letters of options (`choices`), mathematics (`expressions`) or texts."""

from __future__ import annotations

import re
from collections.abc import Callable

from data_tools.tasks.answer_text import clean
from data_tools.tasks.choices import choice_letter, stated_letter
from data_tools.tasks.expressions import same_expression
from data_tools.tasks.final_answer import FinalAnswer, final_answer, first_clause
from data_tools.tasks.quantities import Quantity, same_quantity
from data_tools.tasks.stated_numbers import same_number, stated_quantity


def same_text(reference: str, completion: str) -> bool:
    """Whether the final answer, or a last line without a mark, is the text of the reference."""
    answer = final_answer(completion, topics=False)
    texts = {completion, answer.text, first_clause(answer.text)}
    if answer.mark == "none" and "\n" not in reference.strip():
        texts.add(completion.strip().rpartition("\n")[2])
    stated = {reference, final_answer(reference).text}
    return bool({_line(text) for text in texts} & {_line(text) for text in stated})


def same_answer(one: str, other: str) -> bool:
    """Whether two completions state the same option, the same number of the same unit, or else the same text.

    A unit may be missing. Texts without a marked answer are compared as a whole, unless they end in a number."""
    answers = final_answer(one), final_answer(other)
    letters = [_letter(answer) for answer in answers]
    if None not in letters:
        return letters[0] == letters[1]
    numbers = [_number(completion) for completion in (one, other)]
    if numbers[0] and numbers[1]:
        return same_quantity(numbers[0], numbers[1])
    return _key(answers[0]) == _key(answers[1])


def answer_line(completion: str) -> str:
    """Return a line with the same final answer for `same_answer`, such as `#### 72`; the completion without a mark."""
    answer = final_answer(completion)
    return completion if answer.mark == "none" else f"#### {_statement(answer)}"


def _line(text: str) -> str:
    return clean(text, sentence=True) or text.strip()


def _statement(answer: FinalAnswer) -> str:
    """Return an answer as one clean line."""
    text = first_clause(answer.text) if answer.mark == "cue" else answer.text
    return clean(text, sentence=answer.mark == "cue") or text.strip()


def _letter(answer: FinalAnswer) -> str | None:
    short = answer.mark != "none" or len(answer.text.strip()) <= 5
    return choice_letter(answer.text) if short else None


def _number(completion: str) -> Quantity | None:
    found = stated_quantity(completion)
    return found if found and found.value is not None else None


def _key(answer: FinalAnswer) -> str:
    """Return an answer's text without spaces, and without regard to capitals but in single letters."""
    words = re.sub(r"[^\W\d_]{2,}", lambda word: word[0].casefold(), _statement(answer))
    return words.replace(" ", "")


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": same_text,
    "numeric": same_number,
    "regex": lambda reference, completion: re.search(reference, completion) is not None,
    "choice": lambda reference, completion: stated_letter(completion) == reference.strip().upper(),
    "math": same_expression,
}
