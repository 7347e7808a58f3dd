"""Mapping between the tokens of a target and of a draft model with a reduced vocabulary.

A reduced vocabulary (recipe `tokenizer` with `base_tokenizer`, like EAGLE's d2t) is a subset of the target's, so that
the draft model has a small output layer. A token of the target may correspond to several tokens of the draft model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from parse_infer.models.decoder import common_prefix
from parse_infer.models.loading import same_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenMap:
    """Maps each token of `draft` to a token of `target`.

    Attributes:
        draft_ids, target_ids: ids of the shared tokens in both vocabularies, each once; all ids if both tokenizers are
            the same (`is_identity`).
        to_target: the target's token for each of `draft_ids`; empty if `is_identity`.
    """

    def __init__(
        self, draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, to_target: Mapping[int, int] | None
    ) -> None:
        self.is_identity = to_target is None
        self.to_target = dict(to_target or {})
        everything = range(len(target))
        self.draft_ids: Sequence[int] = everything if to_target is None else list(to_target)
        self.target_ids: Sequence[int] = everything if to_target is None else list(to_target.values())
        self._draft, self._target = draft, target
        self._from_target: dict[int, tuple[int, ...]] = {b: (a,) for a, b in self.to_target.items()}

    def from_target(self, token: int) -> tuple[int, ...]:
        """Translate the target's `token` to draft tokens: one token, several tokens with the same bytes together, or
        none for an id without a token (padding)."""
        if self.is_identity:
            return (token,)
        if token not in self._from_target:
            self._from_target[token] = tuple(self._encode(token))
        return self._from_target[token]

    def _encode(self, token: int) -> list[int]:
        if token == self._target.eos_token_id and self._draft.eos_token_id is not None:
            return [self._draft.eos_token_id]
        name = self._target.convert_ids_to_tokens(token)
        if name is None:
            return []
        if name in self._target.get_added_vocab():  # plain text, not in the byte alphabet
            return self._draft.encode(name, add_special_tokens=False)
        # The tokenizer's inner model accepts bytes that form no character; the tokenizer itself does not.
        inner = _backend(self._draft)
        assert inner is not None
        return [piece.id for piece in inner.model.tokenize(name)]


class TranslatedContext:
    """The target's context in tokens of the draft model. Each call translates only the changed tokens."""

    def __init__(self, tokens: TokenMap) -> None:
        self._tokens = tokens
        self._read: list[int] = []  # target tokens
        self._ids: list[int] = []
        self._ends: list[int] = []  # for each target token the number of draft tokens up to it

    def follow(self, ids: Sequence[int]) -> list[int]:
        """Return the draft tokens of the context `ids`."""
        common = common_prefix(self._read, ids)
        del self._read[common:], self._ends[common:]
        del self._ids[self._ends[-1] if common else 0 :]
        for token in ids[common:]:
            self._ids += self._tokens.from_target(token)
            self._read.append(token)
            self._ends.append(len(self._ids))
        return list(self._ids)


def token_map(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> TokenMap | None:
    """Build the token map; None if tokens of `draft` are not tokens of `target`.

    A map exists for equal tokenizers, and for a byte-level BPE `draft` that is a subset of `target`. A subset has all
    its tokens except padding in the target, and both tokenizers split words and merge tokens in the same way. An end
    token with another name maps to the target's end token.
    """
    if same_tokenizer(draft, target):
        return TokenMap(draft, target, None)
    a, b = _backend(draft), _backend(target)
    if not (_is_byte_level(a) and _is_byte_level(b) and _split_words_alike(a, b)):
        return None
    to_target: dict[int, int] = {}
    added, in_target = draft.get_added_vocab(), target.get_added_vocab()
    vocabulary = draft.get_vocab()
    for token, id_ in vocabulary.items():
        same = b.token_to_id(token)
        if same is not None and (token in added) == (token in in_target):
            to_target[id_] = same
        elif id_ not in (draft.eos_token_id, draft.pad_token_id):
            return None
    end = target.eos_token_id
    if draft.eos_token_id is not None and end is not None and end not in to_target.values():
        to_target[draft.eos_token_id] = end
    if not all(token in added or _splits_as(token, a, b) for token in vocabulary):
        return None
    return TokenMap(draft, target, dict(sorted(to_target.items())))


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the Rust tokenizer, or None."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _is_byte_level(backend: Tokenizer | None) -> TypeGuard[Tokenizer]:
    if backend is None or type(backend.model).__name__ != "BPE" or backend.pre_tokenizer is None:
        return False
    return b"ByteLevel" in _state(backend.decoder) and not backend.model.byte_fallback


def _split_words_alike(a: Tokenizer, b: Tokenizer) -> bool:
    parts = ("normalizer", "pre_tokenizer", "decoder")
    return all(_state(getattr(a, part)) == _state(getattr(b, part)) for part in parts)


def _state(part: Any) -> bytes:
    return b"" if part is None else part.__getstate__()


def _splits_as(word: str, a: Tokenizer, b: Tokenizer) -> bool:
    pieces = [piece.value for piece in b.model.tokenize(word)]
    return any(a.token_to_id(piece) is None for piece in pieces) or pieces == [
        piece.value for piece in a.model.tokenize(word)
    ]
