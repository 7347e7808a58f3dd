"""The rejected rest of a draft still says how the answer might be worded: free guesses for what the target writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.guesses.token_drafter import Guess, TokenDrafter
from parse_infer.models.sampling import Sampling

TOKENS = 8  # of a guess


def continuation(rest: Sequence[int], last: list[int], place: int, n: int) -> list[int]:
    """Up to n tokens of `rest` behind the two tokens `last`, where these stand nearest to index `place`."""
    pairs = [i for i in range(1, len(rest)) if [rest[i - 1], rest[i]] == last]
    at = min(pairs, key=lambda i: abs(i - place), default=len(rest)) + 1
    return list(rest[at : at + n])


class RejectedDraft:
    """Guesses the tokens of a rejected draft, aligned with what has been written in its stead.

    Aligned where the last two written tokens stand in the draft, nearest to their own place; elsewhere it guesses
    nothing. No model runs.

    Args:
        context: up to the accepted cut.
        rest: the draft's tokens behind it.
        otherwise: who guesses elsewhere, if anybody.
        tokens: the length of a guess.
    """

    forwards = 0  # `otherwise` counts its own

    def __init__(
        self, context: Sequence[int], rest: Sequence[int], otherwise: TokenDrafter | None = None, tokens: int = TOKENS
    ) -> None:
        self._start, self._otherwise, self._tokens = len(context), otherwise, tokens
        self._rest = [*context[-1:], *rest]  # the first pair may begin before the cut

    def guess(self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        rest, place = self._rest, len(ids) - self._start  # index of the last written token
        guess = continuation(rest, list(ids[-2:]), place, min(self._tokens, limit))
        if guess or self._otherwise is None:
            return Guess.chain(guess)
        return self._otherwise.guess(ids, limit, sampling, generator)
