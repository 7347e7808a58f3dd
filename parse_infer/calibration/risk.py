"""Tests for safe settings with a stated confidence: Learn then Test (Angelopoulos et al., arXiv 2110.01052).

A setting has a loss of 0 or 1 on each problem. Its risk is the expected loss on a new, exchangeable problem, so the
mean loss of n problems bounds the risk. Fixed-sequence testing fixes the order of settings before any loss is seen. It
tests each against the null hypothesis "risk above the promise" and stops at the first hypothesis that it cannot
reject. All settings that passed keep the promise simultaneously, with the stated confidence, for any number of tests.
Several sequences share the error budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom, binomtest

from parse_infer.errors import CalibrationError


def p_value(losses: ArrayLike, risk: float) -> float:
    """Exact binomial p-value of the hypothesis that the true risk is above `risk`; losses [n], each 0 or 1."""
    values = np.asarray(losses, dtype=np.float64)
    if values.size == 0 or not np.isin(values, (0.0, 1.0)).all():
        raise CalibrationError("losses must be a non-empty list of 0 or 1")
    return float(binom.cdf(int(values.sum()), values.size, risk))


def n_passing(sequence: Iterable[ArrayLike], risk: float, level: float) -> int:
    """Count the settings that pass, from the first (strictest) on, given the losses [n] of each in order.

    With probability at least 1 - `level`, no setting that passes has a risk above `risk`.
    """
    passed = 0
    for losses in sequence:
        if p_value(losses, risk) > level:
            break
        passed += 1
    return passed


def upper_bound(losses: ArrayLike, level: float) -> float:
    """Upper confidence bound, at confidence 1 - `level`, of the risk of one setting with these losses [n]."""
    values = np.asarray(losses, dtype=np.float64)
    return exact_bound(int(values.sum()), values.size, level)


def exact_bound(errors: int, trials: int, level: float) -> float:
    """Clopper-Pearson upper bound, at confidence 1 - `level`, of an error rate with `errors` in `trials` trials."""
    test = binomtest(errors, trials, alternative="less")
    return float(test.proportion_ci(confidence_level=1 - level, method="exact").high)


def least_problems(risk: float, level: float) -> int:
    """Minimum number of problems without loss that proves `risk` at `level`: 230 for 1 % at 90 % confidence."""
    return math.ceil(math.log(level) / math.log1p(-risk))
