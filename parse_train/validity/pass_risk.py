"""Choose the acceptance threshold so that wrong prefixes are rarely accepted, with a stated confidence."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parse_infer.acceptance import ACCEPT_NOTHING
from parse_infer.calibration.risk import exact_bound
from parse_train.validity.metrics import ScoredDrafts, acceptance_curve

# Fixed before any draft is seen, as fixed-sequence testing demands; even in log-odds, from 0.99999 down to 0.00001.
GRID: NDArray[np.float64] = 1 / (1 + np.exp(-np.linspace(11.5, -11.5, 1151)))


@dataclass(frozen=True)
class RiskControl:
    """A threshold and what is known about it.

    With probability at least 1 - delta over the validation drafts, at most a share `alpha` of new drafts from the same
    source gets a wrong prefix accepted. The promise covers one verification pass over one whole draft: an answer made
    in several passes, with the draft model taking over again in between (hand-back), is not covered. Drafts count as
    independent, which several drafts of one problem are not quite.
    """

    threshold: float
    alpha: float
    delta: float
    bound: float | None
    """Upper confidence bound of the false-accept rate at the threshold; None if no threshold qualifies."""
    false_accept_rate: float
    acceptance_rate: float
    n_drafts: int

    @property
    def accepts(self) -> bool:
        return self.bound is not None

    def warning(self) -> str | None:
        """What to tell the user if no threshold qualifies."""
        if self.accepts:
            return None
        least = math.ceil(math.log(self.delta) / math.log(1 - self.alpha))
        too_few = f" ({least} are the least that can show it)" if self.n_drafts < least else ""
        return (
            f"no threshold keeps false accepts at or below risk_alpha {self.alpha:g} with confidence "
            f"{1 - self.delta:g} on {self.n_drafts} validation drafts{too_few}; the exported threshold accepts "
            "nothing. Train longer, hold out more drafts, allow a larger risk_alpha, or pass your own threshold at "
            "inference."
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_threshold(drafts: ScoredDrafts, alpha: float, delta: float) -> RiskControl:
    """The smallest threshold whose false-accept rate is shown to be at most `alpha` with confidence `1 - delta`.

    A draft counts as a false accept if its maximal valid prefix under first-failure acceptance ends in a wrong
    prefix. Thresholds are tested from strict to lax until the first whose Clopper-Pearson bound exceeds `alpha`
    (fixed-sequence testing: no correction for the many thresholds is needed; Learn then Test, arXiv 2110.01052).

    Args:
        drafts: validities of drafts that were not trained on.
    """
    wrong, acceptance = acceptance_curve(drafts, GRID)
    n = len(drafts.labels)
    errors = (wrong * n).round().astype(int)
    too_many = bisect_right(range(n + 1), alpha, key=lambda count: exact_bound(count, n, delta))
    passed = int(np.cumprod(errors < too_many).sum())
    if passed == 0:
        return RiskControl(ACCEPT_NOTHING, alpha, delta, None, 0.0, 0.0, n)
    i = passed - 1
    bound = exact_bound(int(errors[i]), n, delta)
    return RiskControl(float(GRID[i]), alpha, delta, bound, float(wrong[i]), float(acceptance[i]), n)
