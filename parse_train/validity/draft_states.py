"""What the frozen target says about drafts: computed once, read in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class DraftStates(NamedTuple):
    """What token doubt reads of n draft tokens.

    Attributes:
        before: [n, H], the target's final-norm states before them.
        surprise: float32 [n, 3], `TokenSurprisal.features`.
    """

    before: Tensor
    surprise: Tensor


class StateStore:
    """Draft states in memory, up to a number of bytes; what does not fit is computed again whenever it is needed.

    Args:
        max_bytes: all stored states together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._stored: dict[bytes, DraftStates] = {}

    def __call__(
        self, rows: list[Tensor], starts: list[int], compute: Callable[[list[int]], list[DraftStates]]
    ) -> list[DraftStates]:
        """States of each row's draft.

        Args:
            rows: token ids of prompt and draft, without padding.
            starts: where the drafts begin.
            compute: gets the indices of rows that are not stored, and returns theirs.
        """
        keys = [b"%d:%b" % (at, row.cpu().numpy().tobytes()) for at, row in zip(starts, rows, strict=True)]
        found = [self._stored.get(key) for key in keys]
        missing = [i for i, states in enumerate(found) if states is None]
        for i, states in zip(missing, compute(missing) if missing else [], strict=True):
            found[i] = states
            self._keep(keys[i], states)
        return [states for states in found if states is not None]

    def _keep(self, key: bytes, states: DraftStates) -> None:
        size = len(key) + sum(part.numel() * part.element_size() for part in states)
        if size <= self._left and key not in self._stored:
            self._stored[key] = DraftStates(*(part.clone() for part in states))  # a view would keep its whole batch
            self._left -= size
