"""Text of tokens that arrive one after another, by the tokenizer's kind of decoder (`Detokenizer`).

A token may begin and end inside a character. Each class releases text as soon as no later token can change it, so
that the released texts concatenate to what the tokenizer decodes from all tokens at once.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import Any, Protocol, Self, cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens; more than a character has bytes
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's `decode` does nothing but call the Rust tokenizer's."""
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    return isinstance(tokenizer, plain) and kind.decode is plain.decode and kind._decode is plain._decode


class TokenText(Protocol):
    """
    Attributes:
        pending: the whole characters of the text that is held back.
        complete: whether the last token ends a character.
    """

    @property
    def pending(self) -> str: ...

    @property
    def complete(self) -> bool: ...

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that is final now."""
        ...

    def flush(self) -> str:
        """Return the text that is held back, as if no token followed."""
        ...

    def fork(self) -> Self: ...


def token_text(tokenizer: PreTrainedTokenizerBase, decode: Callable[[list[int]], str]) -> TokenText:
    """Return the empty text of a tokenizer's tokens.

    Args:
        decode: decodes tokens of this tokenizer.
    """
    if not decodes_plainly(tokenizer):
        return WindowText(decode, frozenset(tokenizer.all_special_ids))
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = Vocabulary(tokenizer)
    if vocabulary.decoders == ["ByteLevel"]:
        return ByteText(vocabulary)
    if "ByteLevel" in vocabulary.decoders:
        return WindowText(decode, vocabulary.special_ids)
    return PieceText(vocabulary, decode)


class ByteText:
    """Text of a byte-level tokenizer: the UTF-8 of its tokens' bytes. Only an incomplete character is held back."""

    pending = ""

    def __init__(self, vocabulary: Vocabulary, held: bytes = b"") -> None:
        self._vocabulary, self._held = vocabulary, held

    @property
    def complete(self) -> bool:
        return not self._held

    def add(self, ids: Iterable[int]) -> str:
        data = b"".join([self._held, *map(self._vocabulary.bytes_of, ids)])
        text, n = codecs.utf_8_decode(data, "replace", False)
        self._held = held = data[n:]
        # Python holds back the first half of a surrogate, which completes to no character.
        return text + self.flush() if held[:1] == b"\xed" and held[1:2] >= b"\xa0" else text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")

    def fork(self) -> ByteText:
        return ByteText(self._vocabulary, self._held)


class PieceText:
    """Text of a tokenizer whose tokens are pieces of text, or single bytes of what it does not know (byte fallback).

    The decoder replaces each byte of a run by U+FFFD if any of them is no UTF-8. So a run is held back until another
    token ends it, or until it is broken. A piece is decoded behind the pieces before it, because decoders strip a
    space from the first one.
    """

    def __init__(self, vocabulary: Vocabulary, decode: Callable[[list[int]], str]) -> None:
        self.pending, self._broken = "", False
        self._vocabulary, self._decode = vocabulary, decode
        self._context: list[int] = []
        self._run: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    @property
    def complete(self) -> bool:
        return not self._utf8.getstate()[0]

    def add(self, ids: Iterable[int]) -> str:
        visible, is_byte = self._vocabulary.visible(ids), lambda id: self._vocabulary.byte_of(id) is not None
        return "".join(
            self._add_bytes(list(run)) if bytes_follow else self.flush() + self._behind_context(list(run))
            for bytes_follow, run in groupby(visible, is_byte)
        )

    def flush(self) -> str:
        self._broken = False
        return self._release()

    def fork(self) -> Self:
        other = copy.copy(self)
        other._run, other._utf8 = list(self._run), copy.copy(self._utf8)
        return other

    def _add_bytes(self, ids: list[int]) -> str:
        if self._broken:
            return REPLACEMENT * len(ids)
        self._run += ids
        try:
            self.pending += self._utf8.decode(bytes(self._vocabulary.byte_of(id) or 0 for id in ids))
        except UnicodeDecodeError:
            self._broken = True
            return self._release()
        return ""

    def _release(self) -> str:
        run, self._run, self.pending = self._run, [], ""
        self._utf8.reset()
        return self._behind_context(run)

    def _behind_context(self, ids: list[int]) -> str:
        if not ids:
            return ""
        before, both = self._context, [*self._context, *ids]
        self._context = both[-_CONTEXT:]
        return self._decode(both)[len(self._decode(before)) :]


class WindowText:
    """Text of a tokenizer with its own decoder. The last U+FFFD, at most three, may be an incomplete character."""

    pending, complete = "", True

    def __init__(self, decode: Callable[[list[int]], str], special_ids: frozenset[int]) -> None:
        self._decode, self._special_ids = decode, special_ids
        self._window: list[int] = []
        self._released = 0  # characters of the window's text

    def add(self, ids: Iterable[int]) -> str:
        self._window += (id for id in ids if id not in self._special_ids)
        return self._release(max_held=3)

    def flush(self) -> str:
        return self._release(max_held=0)

    def fork(self) -> Self:
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _release(self, max_held: int) -> str:
        text = self._decode(self._window)
        held = min(max_held, len(text) - len(text.rstrip(REPLACEMENT)))
        new = text[self._released : len(text) - held]
        self._released, self.complete = max(self._released, len(text) - held), held == 0
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._released = len(self._decode(self._window)) - held
        return new


class Vocabulary:
    """A tokenizer's tokens, as its decoder reads them.

    Attributes:
        decoders: types of the decoder's steps.
        special_ids: tokens without text.
        bytes_of: returns the bytes of a byte-level token.
        byte_of: returns the byte that a token of a byte fallback stands for, or None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = tokenizer.backend_tokenizer
        self.decoders = _step_types({} if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._backend = backend
        self.bytes_of, self.byte_of = cache(self._bytes_of), cache(self._byte_of)

    def visible(self, ids: Iterable[int]) -> Iterator[int]:
        """Leave out tokens without text: special tokens, and padding of the embeddings."""
        return (id for id in ids if id not in self.special_ids and self._token(id) is not None)

    def _bytes_of(self, id: int) -> bytes:
        token = None if id in self.special_ids else self._token(id)
        inside = token is not None and all(character in _BYTES for character in token)
        # An added token may have characters outside the byte alphabet, such as a space.
        return bytes(_BYTES[c] for c in token) if token and inside else (token or "").encode()

    def _byte_of(self, id: int) -> int | None:
        return _single_byte(self._token(id) or "") if "ByteFallback" in self.decoders else None

    def _token(self, id: int) -> str | None:
        return cast("str | None", self._backend.id_to_token(id))


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, Vocabulary] = WeakKeyDictionary()


def _single_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _step_types(step: dict[str, Any]) -> list[str]:
    if "decoders" in step:
        return [kind for inner in step["decoders"] for kind in _step_types(inner)]
    return [step["type"]] if step else []
