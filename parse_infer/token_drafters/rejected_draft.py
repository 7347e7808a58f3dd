"""Token drafter that reuses the rejected rest of a draft, whose wording the target often repeats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.proposer import TokenProposer, TokenTree

TOKENS = 8  # length of a proposal
Ids = NDArray[np.int32]


def continuation(rest: Ids, last: Sequence[int], place: int, n: int) -> list[int]:
    """Return up to n tokens of `rest` after the occurrence of the two tokens `last` nearest to index `place`."""
    if len(last) < 2:
        return []
    ends = np.flatnonzero((rest[:-1] == last[0]) & (rest[1:] == last[1])) + 1
    if not len(ends):
        return []
    at = ends[np.abs(ends - place).argmin()] + 1
    found: list[int] = rest[at : at + n].tolist()
    return found


class RejectedDraft:
    """Proposes tokens of a rejected draft, aligned with the target's text that replaces the draft.

    The alignment is the nearest occurrence of the last two written tokens in the draft. Without an occurrence, the
    fallback proposes. No model runs.

    Args:
        context: tokens up to the accepted cut.
        rest: the draft's tokens after the cut.
        fallback: token drafter to use without an alignment.
        tokens: maximum number of proposed tokens.
    """

    forwards = 0  # `fallback` counts its own

    def __init__(
        self, context: Sequence[int], rest: Sequence[int], fallback: TokenProposer | None = None, tokens: int = TOKENS
    ) -> None:
        self._start, self._fallback, self._tokens = len(context), fallback, tokens
        self._rest = np.array([*context[-1:], *rest], dtype=np.int32)  # the first pair may begin before the cut

    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        place = len(ids) - self._start  # index of the last written token in the rest
        tokens = continuation(self._rest, ids[-2:], place, min(self._tokens, limit))
        if tokens or self._fallback is None:
            return TokenTree.chain(tokens)
        return self._fallback.propose(ids, limit, sampling, generator)
