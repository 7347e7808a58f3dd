"""Incremental detokenization, exact for characters that span several tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Converts tokens to text as they arrive.

    While the last token ends inside a character, the detokenizer holds the text back until the character is complete.
    Each step decodes only the tokens since the last release, after some left context, because a SentencePiece decoder
    drops a leading space without it. A step costs microseconds for any length of answer. Special tokens have no text.

    Args:
        before: tokens before the text, which continues them.

    Attributes:
        complete: whether the last token ends a character, so that no text is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.text, self.complete = "", True
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._context = 0  # ids[context:released] is the left context of the next tokens
        self._released = len(before)

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._ids.extend(ids)
        return self._release(final=False)

    def flush(self) -> str:
        """Release the text that is still held back, replacement characters included."""
        return self._release(final=True)

    def fork(self) -> Detokenizer:
        """Return an independent copy, for look-ahead."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    def _release(self, final: bool) -> str:
        n = len(self._ids)
        if n == self._released:
            return ""
        self.complete = False
        before = self._decode(self._ids[self._context : self._released])
        # A character has at most four bytes, so at most four tokens. All earlier tokens can be released.
        for end in range(n, n - 1 if final else max(self._released, n - 4), -1):
            now = self._decode(self._ids[self._context : end])
            if final or not now.endswith(_INCOMPLETE):
                break
        else:
            if n - self._released <= 4:
                return ""
            end = n - 4  # tokens before the last four belong to no incomplete character
            now = self._decode(self._ids[self._context : end])
        if len(now) > len(before):  # tokens without text (special tokens) join the left context
            self._context, self._released = self._released, end
        new = now[len(before) :]
        self.text, self.complete = self.text + new, end == n
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return decode(self._tokenizer, ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode tokens without special tokens and without clean-up of spaces."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # same result as its `decode`, in a third of the time
        return cast("str", tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True))
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast("str", text)


def complete_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode tokens without special tokens and without an incomplete last character."""
    return decode(tokenizer, ids).rstrip(_INCOMPLETE)


def encode_continuation(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Tokenize `text` as the continuation of `before`.

    A SentencePiece tokenizer adds a space before every text, which is wrong in the middle of an answer. The function
    therefore encodes `text` after a line break and drops the break's tokens.

    Text that spells a special token stays plain text: a draft that quotes an end token does not end there.
    """

    def encode(plain: str) -> list[int]:
        return tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=True)

    if before:
        anchor, ids = encode("\n"), encode("\n" + text)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return encode(text)
