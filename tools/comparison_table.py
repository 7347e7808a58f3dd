"""Comparison of judges on the same drafts: ranking metrics, and false accepts at an equal acceptance rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap
from sklearn.metrics import average_precision_score, roc_auc_score

from parse_train.judge.metrics import (
    Floats,
    ScoredDrafts,
    acceptance_curve,
    first_error_f1,
    score_thresholds,
)

FIGURES = ("auroc", "auprc", "first_error_f1", "false_accepts")
RESAMPLES = 1000


def compare_judges(
    judges: Mapping[str, ScoredDrafts], problems: Sequence[str], acceptance: float, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return `FIGURES` of each judge, and their 95 % intervals as NAME_ci (percentile bootstrap over problems).

    - auroc, auprc: over all prefixes, with valid prefixes as positives; None for a single class.
    - first_error_f1: see `first_error_f1`, at the best threshold for these drafts.
    - false_accepts: share of drafts with an invalid accepted prefix, at the threshold with acceptance rate
      `acceptance` (linear interpolation between two thresholds).

    Args:
        judges: scores of the same drafts on any scale.
        problems: the problem of each draft; drafts of one problem are resampled together.
    """
    owner = np.unique(np.asarray(problems), return_inverse=True)[1]
    rows_of = [np.flatnonzero(owner == problem) for problem in range(owner.max() + 1)]
    return {name: _figures(drafts, rows_of, acceptance, seed) for name, drafts in judges.items()}


def oracle_acceptance(drafts: ScoredDrafts) -> float:
    """Return the share of draft tokens that a perfect judge accepts: labels in place of validities."""
    perfect = ScoredDrafts((drafts.labels == 1).astype(float), drafts.labels, drafts.cuts)
    return float(acceptance_curve(perfect, [0.5])[1][0])


def false_accepts_at(drafts: ScoredDrafts, acceptance: float, thresholds: Floats) -> float:
    """Return the false-accept rate (share of drafts) at the acceptance rate `acceptance` (share of draft tokens).

    Args:
        thresholds: ascending thresholds.
    """
    wrong, kept = acceptance_curve(drafts, thresholds)
    return float(np.interp(acceptance, kept[::-1], wrong[::-1]))


def _figures(
    drafts: ScoredDrafts, rows_of: Sequence[NDArray[np.int64]], acceptance: float, seed: int
) -> dict[str, Any]:
    thresholds = score_thresholds(drafts)
    f1 = {float(t): first_error_f1(drafts, float(t)).get("f1", np.nan) for t in score_thresholds(drafts, limit=100)}
    best = max(f1, key=lambda threshold: f1[threshold])

    def figures(problems: NDArray[np.int64]) -> Floats:
        rows = np.concatenate([rows_of[int(problem)] for problem in problems])
        part = ScoredDrafts(drafts.scores[rows], drafts.labels[rows], drafts.cuts[rows])
        scores, labels = part.flat
        ranked = [np.nan, np.nan]
        if len(np.unique(labels)) == 2:
            ranked = [roc_auc_score(labels, scores), average_precision_score(labels, scores)]
        found = first_error_f1(part, best).get("f1", np.nan)
        return np.array([*ranked, found, false_accepts_at(part, acceptance, thresholds)])

    everything = np.arange(len(rows_of))
    result: dict[str, Any] = dict(zip(FIGURES, _plain(figures(everything)), strict=True))
    low, high = [None] * len(FIGURES), [None] * len(FIGURES)
    if len(rows_of) > 1:
        interval = bootstrap(
            (everything,), figures, vectorized=False, n_resamples=RESAMPLES, method="percentile", rng=seed
        ).confidence_interval
        low, high = _plain(interval.low), _plain(interval.high)
    for name, ends in zip(FIGURES, zip(low, high, strict=True), strict=True):
        result[f"{name}_ci"] = None if None in ends else list(ends)
    return result


def _plain(values: Floats) -> list[Any]:
    return [None if np.isnan(value) else round(float(value), 5) for value in values]
