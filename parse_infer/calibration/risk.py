"""Which settings are safe, with a stated confidence: Learn then Test (Angelopoulos et al., arXiv 2110.01052).

A setting has a loss of 0 or 1 on each problem; its risk is the expected loss on a new problem. Problems are
exchangeable, so the mean loss of n problems says how large the risk can be. Settings are tested in an order that was
fixed before any loss was seen, each against "its risk is above the promise", and testing stops at the first that this
could still be true of: no setting that passed has a larger risk, with the stated confidence for all of them at once,
however many were tested (fixed-sequence testing). Several orders share the error budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom, binomtest


def p_value(losses: ArrayLike, risk: float) -> float:
    """How likely so few losses are where the true risk is above `risk` (exact, binomial); losses [n], each 0 or 1."""
    values = np.asarray(losses, dtype=np.float64)
    if values.size == 0 or not np.isin(values, (0.0, 1.0)).all():
        raise ValueError("losses must be 0 or 1, at least one of them")
    return float(binom.cdf(int(values.sum()), values.size, risk))


def n_passing(sequence: Iterable[ArrayLike], risk: float, level: float) -> int:
    """How many settings pass, from the first (strictest) on: the losses [n] of each, in order.

    With probability at least 1 - `level`, none of them has a risk above `risk`.
    """
    passed = 0
    for losses in sequence:
        if p_value(losses, risk) > level:
            break
        passed += 1
    return passed


def upper_bound(losses: ArrayLike, level: float) -> float:
    """The smallest risk that these losses [n] show at `level`: an upper confidence bound for one setting."""
    values = np.asarray(losses, dtype=np.float64)
    return exact_bound(int(values.sum()), values.size, level)


def exact_bound(errors: int, trials: int, level: float) -> float:
    """Upper bound, at confidence 1 - `level`, of a rate seen `errors` in `trials` times (Clopper-Pearson)."""
    test = binomtest(errors, trials, alternative="less")
    return float(test.proportion_ci(confidence_level=1 - level, method="exact").high)


def least_problems(risk: float, level: float) -> int:
    """How many problems without any loss it takes to show `risk` at `level`: 230 for 1 % at 90 % confidence."""
    return math.ceil(math.log(level) / math.log1p(-risk))
