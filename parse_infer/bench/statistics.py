"""95 % intervals for a benchmark: Wilson for a share, the paired bootstrap for everything that compares two modes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest, bootstrap

Interval = tuple[float, float]
RESAMPLES = 10_000
_BATCH = 500  # resamples in memory at a time


def wilson_interval(successes: int, n: int) -> Interval:
    """Score interval for a share of successes (Wilson 1927); sensible at 0 and 1, where the usual one has no width.

    Raises ValueError for more successes than trials.
    """
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def difference_interval(ours: ArrayLike, theirs: ArrayLike, *, seed: int = 0) -> Interval:
    """Interval of mean(ours) - mean(theirs); both [n], row i on the same problem."""
    return _paired_interval((ours, theirs), lambda a, b: a.mean(-1) - b.mean(-1), seed)


def rate_ratio_interval(
    ours: ArrayLike, our_seconds: ArrayLike, theirs: ArrayLike, their_seconds: ArrayLike, *, seed: int = 0
) -> Interval:
    """Interval of (sum ours / sum our_seconds) / (sum theirs / sum their_seconds); all [n], row i on one problem.

    With tokens this is the ratio of tokens per second; with ones, the ratio of the times per answer.
    """
    return _paired_interval(
        (ours, our_seconds, theirs, their_seconds),
        lambda a, s, b, t: (a.sum(-1) / s.sum(-1)) / (b.sum(-1) / t.sum(-1)),
        seed,
    )


def _paired_interval(
    columns: tuple[ArrayLike, ...], statistic: Callable[..., NDArray[np.float64]], seed: int
) -> Interval:
    """Percentile interval (Efron 1979) of a statistic of columns [..., n] -> [...], resampling problems.

    Everything measured on one problem stays together: the comparison is paired. The same seed and data give the same
    interval.
    """
    data = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    if data[0].size < 2:  # a single problem has no spread to resample
        value = float(statistic(*data))
        return value, value
    interval = bootstrap(
        data,
        lambda *samples, axis: statistic(*samples),  # always the last axis
        n_resamples=RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        paired=True,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return float(interval.low), float(interval.high)
