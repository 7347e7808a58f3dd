"""Choice of the acceptance threshold that bounds the share of wrongly accepted prefixes, with a stated confidence."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parse_infer.calibration.risk import exact_bound
from parse_infer.settings.acceptance import ACCEPT_NOTHING
from parse_train.judge.metrics import ScoredDrafts, acceptance_curve

# Independent of the drafts, as fixed-sequence testing requires; even in log-odds, from 0.99999 down to 0.00001.
GRID: NDArray[np.float64] = 1 / (1 + np.exp(-np.linspace(11.5, -11.5, 1151)))


@dataclass(frozen=True)
class RiskControl:
    """A threshold and its risk bound.

    With probability at least 1 - delta over the validation drafts, first-failure acceptance accepts a wrong prefix of
    at most a share `alpha` of new drafts from the same source, one per problem. The bound covers one verification pass
    over one whole draft, not an answer from several passes (blocks).
    """

    threshold: float
    alpha: float
    delta: float
    bound: float | None
    """Upper confidence bound of the false-accept rate at the threshold; None if no threshold qualifies."""
    false_accept_rate: float
    acceptance_rate: float
    n_drafts: int
    of_whole_drafts: bool = False
    """Whether the labels say nothing about the inside of drafts, so that no threshold can qualify."""

    @property
    def accepts(self) -> bool:
        return self.bound is not None

    def warning(self) -> str | None:
        """Return a warning for the user if no threshold qualifies."""
        if self.accepts:
            return None
        if self.of_whole_drafts:
            return (
                "labels of whole drafts cannot bound what a pass accepts after an error; the exported threshold "
                "accepts nothing. Run `parse-infer calibrate`, or pass your own threshold at inference."
            )
        min_drafts = math.ceil(math.log(self.delta) / math.log(1 - self.alpha))
        too_few = f" (at least {min_drafts} are necessary)" if self.n_drafts < min_drafts else ""
        return (
            f"no threshold keeps false accepts at or below risk_alpha {self.alpha:g} with confidence "
            f"{1 - self.delta:g} on {self.n_drafts} validation drafts{too_few}; the exported threshold accepts "
            "nothing. Train longer, hold out more problems, raise risk_alpha, or pass your own threshold at inference."
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_of_each(problems: Sequence[str], seed: int) -> list[bool]:
    """Choose one draft per problem at random, without a look at the draft.

    Several drafts of one problem fail together, so a bound over all of them is broken more often than stated."""
    order = np.random.default_rng(seed).permutation(len(problems))
    first = {problems[i]: i for i in reversed(order)}
    return [first[problem] == i for i, problem in enumerate(problems)]


def choose_threshold(drafts: ScoredDrafts, alpha: float, delta: float) -> RiskControl:
    """Return the smallest threshold whose false-accept rate is at most `alpha` with confidence `1 - delta`.

    A draft is a false accept if its maximal valid prefix under first-failure acceptance is invalid. The test goes
    from the strictest threshold down, until a Clopper-Pearson bound exceeds `alpha`. Such fixed-sequence testing needs
    no correction for multiple thresholds (Learn then Test, arXiv 2110.01052).

    Args:
        drafts: validities of held-out drafts, which must be independent (`one_of_each`).
    """
    n = len(drafts.labels)
    if (drafts.real.sum(1) == 1).all():
        return RiskControl(ACCEPT_NOTHING, alpha, delta, None, 0.0, 0.0, n, of_whole_drafts=True)
    wrong, acceptance = acceptance_curve(drafts, GRID)
    errors = (wrong * n).round().astype(int)
    too_many = bisect_right(range(n + 1), alpha, key=lambda count: exact_bound(count, n, delta))
    passed = int(np.cumprod(errors < too_many).sum())
    if passed == 0:
        return RiskControl(ACCEPT_NOTHING, alpha, delta, None, 0.0, 0.0, n)
    i = passed - 1
    bound = exact_bound(int(errors[i]), n, delta)
    return RiskControl(float(GRID[i]), alpha, delta, bound, float(wrong[i]), float(acceptance[i]), n)
