"""Split the growing text of a thinking model into reasoning and content, as vLLM's reasoning parsers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parse_infer.text.thinking import Thinking


@dataclass
class SplitText:
    """Reasoning, and the content that follows it."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits one answer. The text up to the end mark is reasoning, the rest content; neither has a mark.

    An answer that does not think is all content. So is an answer without the mark at its beginning, unless the prompt
    ends inside the thinking. An answer that ends while it thinks is all reasoning.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        begun = False if thinking is None else thinking.begun
        self._start, self._end = ("", "") if thinking is None else (thinking.marks.start, thinking.marks.end)
        self._may_begin, self._thinks = begun is not False, begun is True
        self._held = ""

    def add(self, text: str, last: bool) -> SplitText:
        """Add text; return what no later text can change. `last`: the text ends the answer."""
        text, self._held = self._held + text, ""
        if self._may_begin:
            begins = text.lstrip()
            if self._start.startswith(begins) and begins != self._start and not last:
                self._held = text
                return SplitText()
            self._may_begin = False
            if begins.startswith(self._start):
                self._thinks, text = True, begins.removeprefix(self._start)
        if not self._thinks:
            return SplitText(content=text)
        reasoning, mark, content = text.partition(self._end)
        if mark or last:
            self._thinks = False
            return SplitText(reasoning, content)
        held = begun_length(text, [self._end])
        self._held = text[len(text) - held :]
        return SplitText(text[: len(text) - held])


def begun_length(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that begins, or is, one of the strings."""
    longest = 0
    for string in strings:
        sizes = range(min(len(string), len(text)), longest, -1)
        longest = next((size for size in sizes if text.endswith(string[:size])), longest)
    return longest
