"""95 % intervals for benchmarks: score intervals for shares and their differences, the bootstrap for ratios."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest, bootstrap

Interval = tuple[float, float]
RESAMPLES = 10_000
_BATCH = 500  # resamples per batch


def wilson_interval(successes: int, n: int) -> Interval:
    """Score interval of a share (Wilson 1927), with a width also at 0 and 1, unlike the Wald interval.

    Raises ValueError for more successes than trials.
    """
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values: ArrayLike, *, seed: int = 0) -> Interval:
    """Bootstrap interval of the mean of values [n], one of each problem."""
    return _paired_interval((values,), lambda a: a.mean(-1), seed)


def difference_interval(ours: ArrayLike, theirs: ArrayLike, *, seed: int = 0) -> Interval:
    """Paired interval of mean(ours) - mean(theirs); both [n], row i on the same problem.

    For values 0 and 1 this is Newcombe's interval (1998, method 10), which has a width even without differing
    problems. The bootstrap has none there, and too little coverage with few differing problems.
    """
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if np.isin((ours, theirs), (0.0, 1.0)).all():
        return _paired_shares(ours == 1, theirs == 1)
    return _paired_interval((ours, theirs), lambda a, b: a.mean(-1) - b.mean(-1), seed)


def rate_ratio_interval(
    ours: ArrayLike, our_seconds: ArrayLike, theirs: ArrayLike, their_seconds: ArrayLike, *, seed: int = 0
) -> Interval:
    """Interval of (sum ours / sum our_seconds) / (sum theirs / sum their_seconds); all [n], row i on one problem.

    Token counts give the ratio of tokens per second; ones give the ratio of times per answer.
    """
    return _paired_interval(
        (ours, our_seconds, theirs, their_seconds),
        lambda a, s, b, t: (a.sum(-1) / s.sum(-1)) / (b.sum(-1) / t.sum(-1)),
        seed,
    )


def ratio_intervals(above: ArrayLike, below: ArrayLike, *, seed: int = 0) -> NDArray[np.float64]:
    """Paired percentile intervals of sum(above) / sum(below), for each column of [n, m], as [m, 2].

    All columns share the resamples of the n problems, so many columns cost little more than one.
    """
    columns = [np.asarray(part, dtype=np.float64) for part in (above, below)]
    n = len(columns[0])
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    ratios: NDArray[np.float64] = (drawn @ columns[0]) / (drawn @ columns[1])
    return np.quantile(ratios, [0.025, 0.975], axis=0).T


def _paired_shares(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Interval:
    n, a, b = len(ours), int(ours.sum()), int(theirs.sum())
    both, neither = int((ours & theirs).sum()), int((~ours & ~theirs).sum())
    spread = math.sqrt(a * (n - a) * b * (n - b))
    excess = both * neither - (a - both) * (b - both)
    phi = (max(excess - n / 2, 0) if excess > 0 else excess) / spread if spread else 0.0
    (low_a, high_a), (low_b, high_b) = wilson_interval(a, n), wilson_interval(b, n)

    def width(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (a - b) / n
    return difference - width(a / n - low_a, high_b - b / n), difference + width(high_a - a / n, b / n - low_b)


def _paired_interval(
    columns: tuple[ArrayLike, ...], statistic: Callable[..., NDArray[np.float64]], seed: int
) -> Interval:
    """Percentile interval (Efron 1979) of a statistic of columns [..., n] -> [...], resampling problems.

    Paired: all columns are resampled together. The result is deterministic for a seed.
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
