"""Prompt lookup: propose the tokens after an earlier occurrence of the last few tokens (Saxena 2023; no model)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.errors import ModelError
from parse_infer.models.decoder import common_prefix
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.proposer import TokenTree


class PromptLookupDrafter:
    """Proposes the continuation of the latest earlier occurrence of the context's last tokens.

    Args:
        tokens: number of proposed tokens.
        max_ngram, min_ngram: lengths of the match; the longest match wins.

    Raises:
        ValueError: a size below 1, or max_ngram below min_ngram.
    """

    forwards = 0

    def __init__(self, tokens: int = 6, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if min(tokens, min_ngram) < 1 or max_ngram < min_ngram:
            raise ModelError(
                f"lookup needs tokens >= 1 and 1 <= min_ngram <= max_ngram, not tokens={tokens}, "
                f"min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self.tokens, self.max_ngram, self.min_ngram = tokens, max_ngram, min_ngram
        self._context = _IndexedContext(range(max_ngram, min_ngram - 1, -1))

    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        size = min(self.tokens, limit)
        if size <= 0:
            return TokenTree.chain(())
        self._context.follow(ids)
        end = self._context.earlier_end()
        return TokenTree.chain(() if end is None else list(ids[end : end + size]))


class _IndexedContext:
    """A context with an index of its n-grams. An update costs constant time per changed token.

    Args:
        lengths: lengths of the n-grams, the longest first.
    """

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # ascending, for each n-gram

    def follow(self, ids: Sequence[int]) -> None:
        """Make `ids` the context."""
        common = common_prefix(self._ids, ids)
        while len(self._ids) > common:
            for ngram in self._tails():
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
            self._ids.pop()
        for token in ids[common:]:
            self._ids.append(token)
            for ngram in self._tails():
                self._ends.setdefault(ngram, []).append(len(self._ids))

    def earlier_end(self) -> int | None:
        """Return the end of the latest earlier occurrence of the context's longest repeated n-gram tail, or None."""
        ends = (self._ends[ngram] for ngram in self._tails())
        return next((of_one[-2] for of_one in ends if len(of_one) > 1), None)

    def _tails(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the context."""
        return [tuple(self._ids[-n:]) for n in self._lengths if n <= len(self._ids)]
