"""Text of a token list that grows, exact where a character spans several tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Turns tokens into text as they arrive.

    Text is held back while the last token ends inside a character, and released by the token that completes it.
    Each step decodes only the tokens since the last release, with the ones before as left context (a
    SentencePiece decoder drops a leading space without it), so that a step costs microseconds however long the
    answer is. Special tokens have no text.

    Args:
        before: tokens in front of the text, which is continued.

    Attributes:
        complete: whether the last token ends a character, so that no text is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.text, self.complete = "", True
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._context = 0  # ids[context:released] is the left context of what comes next
        self._released = len(before)

    def add(self, ids: Sequence[int]) -> str:
        """Take more tokens; return the text that became readable with them."""
        self._ids.extend(ids)
        return self._release(final=False)

    def flush(self) -> str:
        """Release what is still held back, replacement characters included."""
        return self._release(final=True)

    def fork(self) -> Detokenizer:
        """An independent continuation, for looking ahead."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    def _release(self, final: bool) -> str:
        n = len(self._ids)
        if n == self._released:
            return ""
        self.complete = False
        before = self._decode(self._ids[self._context : self._released])
        # A character has at most four bytes, so at most four tokens: with several tokens at once, all but its own
        # can be released.
        for end in range(n, n - 1 if final else max(self._released, n - 4), -1):
            now = self._decode(self._ids[self._context : end])
            if final or not now.endswith(_INCOMPLETE):
                break
        else:
            if n - self._released <= 4:
                return ""
            end = n - 4  # what is still held in front of the last four belongs to no character
            now = self._decode(self._ids[self._context : end])
        if len(now) > len(before):  # tokens without text (special ones) join the left context of what follows
            self._context, self._released = self._released, end
        new = now[len(before) :]
        self.text, self.complete = self.text + new, end == n
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return decode(self._tokenizer, ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of the tokens without special tokens, spaces as they are."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # what its `decode` does, in a third of the time
        return cast("str", tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True))
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast("str", text)


def complete_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of the tokens without special tokens and without an incomplete last character."""
    return decode(tokenizer, ids).rstrip(_INCOMPLETE)


def encode_continuation(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Tokens of `text` as the continuation of `before`.

    A SentencePiece tokenizer puts a space in front of every text it encodes; in the middle of an answer that
    space must not appear. Encoding after a line break and dropping the break's tokens avoids it.

    What is spelt like a special token is text all the same: a draft that quotes an end token does not end there.
    """

    def encode(spelt: str) -> list[int]:
        return tokenizer.encode(spelt, add_special_tokens=False, split_special_tokens=True)

    if before:
        anchor, ids = encode("\n"), encode("\n" + text)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return encode(text)
