"""Tests for safe settings with a stated confidence: Learn then Test (Angelopoulos et al., arXiv 2110.01052).

A setting has a loss on each problem: 0 or 1, or a number from -1 to 1, such as a difference of accuracies. Its risk
is the expected loss on a new, exchangeable problem, so the mean loss of n problems bounds the risk. Fixed-sequence
testing fixes the order of settings before any loss is seen. It tests each against the null hypothesis "risk above the
promise" and stops at the first hypothesis that it cannot reject. All settings that passed keep the promise
simultaneously, with the stated confidence, for any number of tests. Several sequences share the error budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom, binomtest

from parse_infer.errors import CalibrationError

_LARGEST_STAKE = 0.75  # share of the capital that one loss of 1 can cost
_PRECISION = 1e-6  # of a bound


def p_value(losses: ArrayLike, risk: float, level: float, *, binary: bool = True) -> float:
    """p-value of the hypothesis that the true risk is above `risk`, from losses [n].

    Losses of 0 or 1 have the exact binomial test. Others have a bet that they are below `risk` on average
    (Waudby-Smith and Ramdas, arXiv 2010.09686): under the hypothesis its capital seldom grows. The stakes follow the
    variance of the losses before, so losses that are mostly 0 need few problems.

    Args:
        level: the stakes are best for a test at this level; the p-value is valid for every level.
        binary: losses can only be 0 or 1, whatever was seen; else they are numbers from -1 to 1.
    """
    values = np.asarray(losses, dtype=np.float64)
    if binary:
        if values.size == 0 or not np.isin(values, (0.0, 1.0)).all():
            raise CalibrationError("losses must be a non-empty list of 0 or 1")
        return float(binom.cdf(int(values.sum()), values.size, risk))
    if values.size == 0 or not (np.abs(values) <= 1).all():
        raise CalibrationError("losses must be a non-empty list of numbers from -1 to 1")
    seen = np.arange(1, values.size + 1)
    mean = values.cumsum() / (seen + 1)
    variance = (0.25 + ((values - mean) ** 2).cumsum()) / (seen + 1)
    before = np.concatenate([[0.25], variance[:-1]])  # a stake may depend on earlier losses only
    stake = np.sqrt(2 * math.log(1 / level) / (values.size * before)).clip(max=_LARGEST_STAKE / (1 - risk))
    capital = np.log1p(stake * (risk - values)).cumsum()
    return float(min(1.0, math.exp(-capital.max())))


def n_passing(sequence: Iterable[ArrayLike], risk: float, level: float, *, binary: bool = True) -> int:
    """Count the settings that pass, from the first (strictest) on, given the losses [n] of each in order.

    With probability at least 1 - `level`, no setting that passes has a risk above `risk`.
    """
    passed = 0
    for losses in sequence:
        if p_value(losses, risk, level, binary=binary) > level:
            break
        passed += 1
    return passed


def upper_bound(losses: ArrayLike, level: float, *, binary: bool = True) -> float:
    """Upper confidence bound, at confidence 1 - `level`, of the risk of one setting with these losses [n]."""
    values = np.asarray(losses, dtype=np.float64)
    if binary:
        return exact_bound(int(values.sum()), values.size, level)
    low, high = float(values.mean()), 1.0 - 1e-9
    if p_value(values, high, level, binary=False) > level:
        return 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if p_value(values, middle, level, binary=False) <= level else (middle, high)
    return high


def exact_bound(errors: int, trials: int, level: float) -> float:
    """Clopper-Pearson upper bound, at confidence 1 - `level`, of an error rate with `errors` in `trials` trials."""
    test = binomtest(errors, trials, alternative="less")
    return float(test.proportion_ci(confidence_level=1 - level, method="exact").high)


def least_problems(risk: float, level: float, *, binary: bool = True) -> int:
    """Minimum number of problems without loss that proves `risk` at `level`: 230 for 1 % at 90 % confidence.

    Losses that are means of samples (not `binary`) need a third more.
    """
    n = math.ceil(math.log(level) / math.log1p(-risk))
    while not binary and p_value(np.zeros(n), risk, level, binary=False) > level:
        n += 1
    return n
