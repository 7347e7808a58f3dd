"""Cache of the frozen target's states of drafts, computed once and read in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class DraftStates(NamedTuple):
    """Inputs of token doubt for n draft tokens.

    Attributes:
        before: [n, H], the target's final-norm states before these tokens.
        surprise: float32 [n, 3], `TokenSurprisal.features`.
        certain: bool [n], tokens that add no doubt: the target's greedy choices. With a probe, none.
    """

    before: Tensor
    surprise: Tensor
    certain: Tensor


class StateStore:
    """Cache of draft states with at most `max_bytes` bytes; states that do not fit are computed on every call."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._stored: dict[bytes, DraftStates] = {}

    def __call__(
        self, rows: list[Tensor], starts: list[int], compute: Callable[[list[int]], list[DraftStates]]
    ) -> list[DraftStates]:
        """Return the states of each row's draft.

        Args:
            rows: token ids of prompt and draft, without padding.
            starts: offset of the draft in each row.
            compute: called with the indices of uncached rows, and returns their states.
        """
        keys = [b"%d:%b" % (at, row.cpu().numpy().tobytes()) for at, row in zip(starts, rows, strict=True)]
        stored = [self._stored.get(key) for key in keys]
        missing = [i for i, states in enumerate(stored) if states is None]
        for i, states in zip(missing, compute(missing) if missing else [], strict=True):
            stored[i] = states
            self._keep(keys[i], states)
        return [states for states in stored if states is not None]

    def _keep(self, key: bytes, states: DraftStates) -> None:
        size = len(key) + sum(part.numel() * part.element_size() for part in states)
        if size <= self._left and key not in self._stored:
            self._stored[key] = DraftStates(
                *(part.clone() for part in states)
            )  # a view would keep the whole batch alive
            self._left -= size
