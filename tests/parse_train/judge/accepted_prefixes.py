"""Acceptance draft by draft, the reference for `acceptance_curve`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parse_train.judge.metrics import ScoredDrafts


@dataclass(frozen=True)
class Acceptance:
    """Result of first-failure acceptance at one threshold, per draft: [N]."""

    accepted: NDArray[np.int64]
    """Number of accepted cuts."""
    tokens: NDArray[np.int64]
    """Number of accepted tokens."""
    wrong: NDArray[np.bool_]
    """Whether the accepted prefix is not empty and is invalid (a false accept)."""


def accept(drafts: ScoredDrafts, threshold: float) -> Acceptance:
    """Apply `parse_infer.settings.acceptance.maximal_valid_prefix` with the rule "first_failure" to every draft."""
    accepted = np.cumprod((drafts.scores >= threshold) & drafts.real, axis=1).sum(axis=1)
    rows, last = np.arange(len(accepted)), np.maximum(accepted - 1, 0)
    some = accepted > 0
    tokens = np.where(some, drafts.cuts[rows, last], 0)
    return Acceptance(accepted, tokens, some & (drafts.labels[rows, last] == 0))
