"""Incremental detokenization, exact for characters that span several tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from parse_infer.errors import PromptError, is_unicode
from parse_infer.text.token_text import decodes_plainly, token_text


class Detokenizer:
    """Converts tokens to text as they arrive.

    The texts concatenate to what `decode` returns for all tokens, however they arrive. Text is held back only while
    later tokens can change it: an incomplete character, or an unfinished run of bytes (`token_text.PieceText`).
    A step costs microseconds for any length of answer. Special tokens have no text.

    Args:
        before: tokens before the text, which continues them. A character that they begin belongs to the text.

    Attributes:
        released: the final text, as `add` and `flush` have returned it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.released = ""
        self._tokens = token_text(tokenizer, partial(decode, tokenizer))
        self._tokens.add(before)
        self._not_ours = len(self._tokens.pending)  # characters of `before` that are held back

    @property
    def complete(self) -> bool:
        """Whether the last token ends a character, so that `text` covers all tokens."""
        return self._tokens.complete

    @property
    def text(self) -> str:
        """The text so far: all its whole characters, also those that are held back."""
        return self.released + self._tokens.pending[self._not_ours :]

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that becomes final."""
        return self._release(self._tokens.add(ids))

    def flush(self) -> str:
        """Release the text that is still held back, replacement characters included."""
        return self._release(self._tokens.flush())

    def segments(self, parts: Sequence[Sequence[int]]) -> list[str]:
        """Add all parts and flush; return the text of each part. A split character belongs to the later part.

        The texts continue what was released so far.
        """
        if not any(parts):
            return [""] * len(parts)
        ends = [len(self.released)]
        for ids in parts:
            self.add(ids)
            ends.append(len(self.text))
        self.flush()
        ends[-1] = len(self.text)
        return [self.text[start:end] for start, end in pairwise(ends)]

    def fork(self) -> Detokenizer:
        """Return an independent copy, for look-ahead."""
        other = Detokenizer.__new__(Detokenizer)  # `copy.copy` takes three times as long
        other.released, other._tokens, other._not_ours = self.released, self._tokens.fork(), self._not_ours
        return other

    def _release(self, text: str) -> str:
        n = min(self._not_ours, len(text))
        self._not_ours -= n
        self.released += text[n:]
        return text[n:]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode tokens without special tokens and without clean-up of spaces."""
    if decodes_plainly(tokenizer):  # same result as its `decode`, in a third of the time
        return cast("str", tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True))
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast("str", text)


def complete_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode tokens without special tokens and without an incomplete last character."""
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add(ids)
    return detokenizer.text


def encode_continuation(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Tokenize `text` as the continuation of `before`.

    A SentencePiece tokenizer adds a space before every text, which is wrong in the middle of an answer. The function
    therefore encodes `text` after a line break and drops the break's tokens.

    Text that spells a special token stays plain text: a draft that quotes an end token does not end there.
    """
    check_unicode(text)
    plain = without_special_tokens(tokenizer)

    def encode(text: str) -> list[int]:
        return plain.encode(text, add_special_tokens=False, split_special_tokens=True)

    if before:
        anchor, ids = encode("\n"), encode("\n" + text)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return encode(text)


def check_unicode(text: str) -> None:
    """Raise PromptError for a text that no tokenizer can encode."""
    if not is_unicode(text):
        half = next(i for i, character in enumerate(text) if not is_unicode(character))
        raise PromptError(
            f"The text {text[max(0, half - 20) : half + 20]!r} has half of a surrogate pair, which is no character: "
            "read its bytes as UTF-8, or remove it."
        )


_copies: WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = WeakKeyDictionary()
_copying = threading.Lock()


def without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the copy of a tokenizer that reads special tokens as plain text; the first call takes seconds.

    `split_special_tokens` is a state of the Rust tokenizer, which other threads use at the same time.
    """
    with _copying:
        plain = _copies.get(tokenizer)
        if plain is None:
            plain = _copies[tokenizer] = copy.deepcopy(tokenizer)
            plain.encode("", add_special_tokens=False, split_special_tokens=True)  # no later call changes the state
        return plain
