"""Prompt lookup: what followed the last few tokens where they stood before (Saxena 2023; no model, no training)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.guesses.token_drafter import Guess
from parse_infer.models.sampling import Sampling


class LookupDrafter:
    """Guesses the continuation of the latest earlier place where the context's last tokens stand.

    Args:
        tokens: how many tokens are guessed.
        max_ngram, min_ngram: the longest match is tried first.

    Raises:
        ValueError: a size below 1, or max_ngram below min_ngram.
    """

    forwards = 0

    def __init__(self, tokens: int = 6, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if min(tokens, min_ngram) < 1 or max_ngram < min_ngram:
            raise ValueError(
                f"lookup needs tokens >= 1 and 1 <= min_ngram <= max_ngram, not tokens={tokens}, "
                f"min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self.tokens, self.max_ngram, self.min_ngram = tokens, max_ngram, min_ngram

    def guess(self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        size = min(self.tokens, limit)
        if size > 0:
            text = torch.tensor(ids)
            for n in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
                places = (text[:-1].unfold(0, n, 1) == text[-n:]).all(-1).nonzero()
                if len(places):
                    start = int(places[-1]) + n
                    return Guess.chain(list(ids[start : start + size]))
        return Guess.chain(())
