"""95 % intervals for benchmarks: score intervals for shares and their differences, the bootstrap for ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

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


def share_interval(shares: ArrayLike, samples: int = 1) -> Interval:
    """Wilson's interval of the mean of shares [n], each of `samples` answers to one problem, with a width at 0 and 1
    too.

    It counts as many trials as have the variance of this mean (Kish's design effect; Korn and Graubard 1998): between
    the number of problems, where the samples of a problem are alike, and that of all answers.
    """
    shares = np.asarray(shares, dtype=np.float64)
    n, mean = len(shares), float(shares.mean())
    spread = float(shares.var())
    trials = n * min(max(mean * (1 - mean) / spread, 1.0), samples) if spread else n
    z = NormalDist().inv_cdf(0.975)
    centre, width = mean + z * z / (2 * trials), z * math.sqrt(mean * (1 - mean) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    return max(0.0, (centre - width) / scale), min(1.0, (centre + width) / scale)


def difference_interval(
    ours: ArrayLike, theirs: ArrayLike, *, samples: int | None = None, seed: int = 0
) -> Interval | None:
    """Paired interval of mean(ours) - mean(theirs); both [n], row i on the same problem.

    For shares of `samples` answers this is Newcombe's interval (1998, method 10; Zou and Donner 2008 for other
    estimates than proportions) of two `share_interval`s. It has a width even without differing problems. The bootstrap
    has none there, and too little coverage with few differing problems; it serves other values (`samples` None and not
    all of them 0 or 1).
    """
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if samples is None and not np.isin((ours, theirs), (0.0, 1.0)).all():
        return _paired_interval((ours, theirs), lambda a, b: a.mean(-1) - b.mean(-1), seed)
    return _paired_shares(ours, theirs, samples or 1)


def rate_ratio_interval(
    ours: ArrayLike, our_seconds: ArrayLike, theirs: ArrayLike, their_seconds: ArrayLike, *, seed: int = 0
) -> Interval | None:
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


def _paired_shares(ours: NDArray[np.float64], theirs: NDArray[np.float64], samples: int) -> Interval:
    n, a, b = len(ours), float(ours.mean()), float(theirs.mean())
    spread = math.sqrt(ours.var() * theirs.var())
    covariance = float((ours * theirs).mean()) - a * b
    # The continuity correction is half an answer.
    least = max(covariance - 0.5 / (n * samples), 0) if covariance > 0 else covariance
    phi = least / spread if spread else 0.0
    (low_a, high_a), (low_b, high_b) = share_interval(ours, samples), share_interval(theirs, samples)

    def width(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return a - b - width(a - low_a, high_b - b), a - b + width(high_a - a, b - low_b)


def _paired_interval(
    columns: tuple[ArrayLike, ...], statistic: Callable[..., NDArray[np.float64]], seed: int
) -> Interval | None:
    """Percentile interval (Efron 1979) of a statistic of columns [..., n] -> [...], resampling problems.

    Paired: all columns are resampled together. The result is deterministic for a seed. A single problem has no spread
    to resample, and no interval.
    """
    data = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    if data[0].size < 2:
        return None
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
