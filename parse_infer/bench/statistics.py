"""Intervals for a benchmark: Wilson for a share, the paired bootstrap for everything that compares two modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]
Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
RESAMPLES = 10_000
_CHUNK = 1000  # resamples turned into floats at a time


def wilson_interval(successes: int, n: int, z: float = Z95) -> Interval:
    """Score interval for a share of successes (Wilson 1927); sensible at 0 and 1, where the usual one has no width.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"a share needs 0 <= successes <= n and n >= 1, not {successes} of {n}")
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(
    columns: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """95 % percentile interval of a statistic of column sums, resampling rows (Efron 1979).

    Rows are problems, so that everything measured on one problem stays together: the comparison is paired.

    Args:
        columns: [n, c], one row per problem.
        statistic: maps column sums [..., c] of n resampled rows to values [...].
        seed: the same seed and data give the same interval.
    """
    rows = np.asarray(columns, dtype=np.float64)
    counts = _resampled_counts(len(rows), resamples, seed)
    sums = [counts[i : i + _CHUNK].astype(np.float64) @ rows for i in range(0, resamples, _CHUNK)]
    values = statistic(np.concatenate(sums))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=4)
def _resampled_counts(n: int, resamples: int, seed: int) -> NDArray[np.int16]:
    """How often each of n rows is drawn: [resamples, n]. Kept, because one report asks for dozens of intervals."""
    generator = np.random.default_rng(seed)
    counts = np.empty((resamples, n), dtype=np.int16)
    for i in range(resamples):
        counts[i] = np.bincount(generator.integers(0, n, size=n), minlength=n)
    return counts


def difference_interval(ours: ArrayLike, theirs: ArrayLike, *, seed: int = 0) -> Interval:
    """Interval of mean(ours) - mean(theirs); both [n], row i on the same problem."""
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    n = len(difference)
    return bootstrap_interval(difference[:, None], lambda sums: sums[..., 0] / n, seed=seed)


def rate_ratio_interval(
    ours: ArrayLike, our_seconds: ArrayLike, theirs: ArrayLike, their_seconds: ArrayLike, *, seed: int = 0
) -> Interval:
    """Interval of (sum ours / sum our_seconds) / (sum theirs / sum their_seconds); all [n], row i on one problem.

    With tokens this is the ratio of tokens per second; with ones, the ratio of the times per answer.
    """
    columns = np.stack([np.asarray(c, dtype=np.float64) for c in (ours, our_seconds, theirs, their_seconds)], axis=1)
    return bootstrap_interval(columns, lambda s: (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3]), seed=seed)
