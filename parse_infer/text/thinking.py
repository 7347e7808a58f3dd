"""The thinking of a model before its answer, between marks such as `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from parse_infer.errors import ModelError
from parse_infer.text.prompts import Prompt, open_turn

DETECTED = "<think> </think>"
OFF = "none"
_TAIL = 16  # tokens at the end of a prompt; more than a mark and white space have


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks around the thinking of a model: texts, and single tokens of its tokenizer."""

    start: str
    end: str
    start_id: int
    end_id: int


@dataclass(frozen=True)
class Thinking:
    """The thinking of one answer.

    Attributes:
        begun: the prompt ends inside the thinking (True), after it (False), or before it (None). Then the answer
            thinks if it begins with the mark.
    """

    marks: ThinkingMarks
    begun: bool | None

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the thinking is over after the tokens `ids` of the answer, but not before the last of them."""
        if self.begun is False:
            return True
        return bool(ids) and (ids[-1] == self.marks.end_id or (len(ids) == 1 and not self._begins(ids[0])))

    def tokens_of(self, draft: Sequence[int], written: Sequence[int]) -> int:
        """Number of draft tokens that belong to the thinking, end mark included.

        Args:
            written: the answer before the draft; its thinking has not ended.
        """
        if draft and not written and not self._begins(draft[0]):
            return 0
        return next((i for i, token in enumerate(draft, start=1) if token == self.marks.end_id), len(draft))

    def _begins(self, first: int) -> bool:
        return self.begun is True or first == self.marks.start_id


def find_marks(tokenizer: PreTrainedTokenizerBase, marks: str | None = None) -> ThinkingMarks | None:
    """Return the marks of a model that thinks, None for another model.

    Args:
        marks: start and end, separated by a space; None looks for `DETECTED`, `OFF` for none.

    Raises ModelError for marks that are not tokens with a text.
    """
    if marks == OFF:
        return None
    named = (DETECTED if marks is None else marks).split()
    if len(named) != 2 or named[0] == named[1]:
        raise ModelError(f"thinking_marks is {marks!r}; give two different marks, as in {DETECTED!r}, or {OFF!r}.")
    vocabulary = tokenizer.get_vocab()
    unknown = next((mark for mark in named if not _is_shown(tokenizer, mark, vocabulary.get(mark))), None)
    if unknown is None:
        start, end = named
        return ThinkingMarks(start, end, vocabulary[start], vocabulary[end])
    if marks is None:
        return None
    raise ModelError(
        f"thinking_marks has {unknown!r}, which is no token with a text of {tokenizer.name_or_path!r}: name its own "
        f"marks, or give {OFF!r}."
    )


def thinking_of(
    tokenizer: PreTrainedTokenizerBase, marks: ThinkingMarks, prompt: Prompt, prompt_ids: Sequence[int]
) -> Thinking:
    """The thinking of the answer to a prompt.

    Only the end of the prompt counts, or the assistant's text that the answer continues: a user may write the marks.
    """
    end = str(tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)).rstrip()
    if end.endswith((marks.start, marks.end)):
        return Thinking(marks, end.endswith(marks.start))
    text = open_turn(prompt, tokenizer)
    starts, ends = text.rfind(marks.start), text.rfind(marks.end)
    return Thinking(marks, None if starts == ends else starts > ends)


def _is_shown(tokenizer: PreTrainedTokenizerBase, mark: str, id: int | None) -> bool:
    """Whether a mark is a token whose text an answer shows; special tokens have none."""
    return id is not None and tokenizer.decode([id], skip_special_tokens=True) == mark
