"""The rejected rest of a draft still says how the answer might be worded: free guesses for what the target writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from parse_infer.models.sampling import Sampling
from parse_infer.speculation.proposer import TokenProposer, TokenTree

TOKENS = 8  # of a guess
Ids = NDArray[np.int32]


def continuation(rest: Ids, last: Sequence[int], place: int, n: int) -> list[int]:
    """Up to n tokens of `rest` behind the two tokens `last`, where these stand nearest to index `place`."""
    if len(last) < 2:
        return []
    ends = np.flatnonzero((rest[:-1] == last[0]) & (rest[1:] == last[1])) + 1
    if not len(ends):
        return []
    at = ends[np.abs(ends - place).argmin()] + 1
    found: list[int] = rest[at : at + n].tolist()
    return found


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
        self, context: Sequence[int], rest: Sequence[int], otherwise: TokenProposer | None = None, tokens: int = TOKENS
    ) -> None:
        self._start, self._otherwise, self._tokens = len(context), otherwise, tokens
        self._rest = np.array([*context[-1:], *rest], dtype=np.int32)  # the first pair may begin before the cut

    def guess(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        place = len(ids) - self._start  # of the last written token in the rest
        guess = continuation(self._rest, ids[-2:], place, min(self._tokens, limit))
        if guess or self._otherwise is None:
            return TokenTree.chain(guess)
        return self._otherwise.guess(ids, limit, sampling, generator)
