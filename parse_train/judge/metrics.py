"""Metrics of prefix scores: ranking, calibration, first errors, and acceptance at a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from parse_train.training_config import IGNORED

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ScoredDrafts:
    """Scores of N drafts with up to K cuts each, as arrays [N, K].

    scores  float64, higher means more likely valid (validities, or a baseline's score)
    labels  1 valid, 0 invalid, -100 padding on the right
    cuts    ascending token offsets in the draft; the last cut is the draft's length
    """

    scores: Floats
    labels: NDArray[np.int64]
    cuts: NDArray[np.int64]

    @classmethod
    def from_prediction(cls, logits: ArrayLike, label_ids: Any) -> ScoredDrafts:
        """Convert `Trainer`'s predictions: logits [N, K], and (labels, cuts)."""
        labels, cuts = label_ids
        real = np.asarray(labels) != IGNORED
        # Clip, because exp() would overflow on padding and saturated logits.
        validity = 1 / (1 + np.exp(-np.clip(np.asarray(logits, dtype=np.float64), -60, 60)))
        return cls(np.where(real, validity, 0.0), np.asarray(labels), np.asarray(cuts))

    @classmethod
    def from_rows(
        cls, scores: Sequence[Sequence[float]], labels: Sequence[Sequence[bool]], cuts: Sequence[Sequence[int]]
    ) -> ScoredDrafts:
        """Pad lists of unequal length."""
        shape = (len(labels), max(map(len, labels)))
        arrays = np.zeros(shape), np.full(shape, IGNORED), np.full(shape, IGNORED)
        for i, row in enumerate(zip(scores, labels, cuts, strict=True)):
            for array, values in zip(arrays, row, strict=True):
                array[i, : len(values)] = values
        return cls(*arrays)

    def select(self, chosen: Sequence[bool]) -> ScoredDrafts:
        """Return the chosen drafts."""
        kept = np.asarray(chosen, dtype=bool)
        return ScoredDrafts(self.scores[kept], self.labels[kept], self.cuts[kept])

    @property
    def real(self) -> NDArray[np.bool_]:
        """[N, K], False in padding."""
        return self.labels != IGNORED

    @property
    def flat(self) -> tuple[Floats, NDArray[np.int64]]:
        """Scores and labels of all cuts of all drafts, [sum of K]."""
        return self.scores[self.real], self.labels[self.real]


def acceptance_curve(drafts: ScoredDrafts, thresholds: ArrayLike) -> tuple[Floats, Floats]:
    """Return the false-accept rate (share of drafts) and acceptance rate (share of tokens) at each threshold.

    A false accept is a draft whose accepted prefix is not empty and is invalid. First-failure acceptance accepts
    exactly k cuts at thresholds above the minimum of the first k + 1 scores, up to the minimum of the first k scores.
    The sum over these intervals costs the same for one threshold or thousands.
    """
    thresholds = np.asarray(thresholds, dtype=np.float64)
    order = np.argsort(thresholds)
    lowest = np.minimum.accumulate(np.where(drafts.real, drafts.scores, -np.inf), axis=1)
    beyond = np.full((len(lowest), 1), -np.inf)
    first = np.searchsorted(thresholds[order], np.concatenate([lowest[:, 1:], beyond], axis=1), side="right")
    after = np.searchsorted(thresholds[order], lowest, side="right")
    curves = []
    for value in (drafts.labels == 0, drafts.cuts):
        steps = np.zeros(len(thresholds) + 1)
        np.add.at(steps, first[drafts.real], value[drafts.real])
        np.subtract.at(steps, after[drafts.real], value[drafts.real])
        curve = np.empty(len(thresholds))
        curve[order] = np.cumsum(steps)[:-1]
        curves.append(curve)
    return curves[0] / len(lowest), curves[1] / drafts.cuts.max(axis=1).sum()


def score_thresholds(drafts: ScoredDrafts, limit: int = 500) -> Floats:
    """Return at most `limit` thresholds at which a decision changes, and one threshold that accepts nothing."""
    distinct = np.unique(drafts.flat[0])
    if len(distinct) > limit:
        distinct = distinct[np.linspace(0, len(distinct) - 1, limit).round().astype(int)]
    return np.append(distinct, np.nextafter(distinct[-1], np.inf))


def acceptance_at_risk(drafts: ScoredDrafts, alpha: float) -> float:
    """Return the highest acceptance rate with a false-accept rate of at most `alpha` on these drafts, not on new."""
    wrong, acceptance = acceptance_curve(drafts, score_thresholds(drafts))
    return float(acceptance[wrong <= alpha].max())


def expected_calibration_error(probabilities: Floats, labels: NDArray[np.int64], n_bins: int = 15) -> float:
    """Return the size-weighted mean gap of probability and frequency over equal-width bins (Guo et al., 2017)."""
    bins = np.minimum((probabilities * n_bins).astype(int), n_bins - 1)
    size = np.bincount(bins, minlength=n_bins)
    gap = np.abs(np.bincount(bins, probabilities, n_bins) - np.bincount(bins, labels, n_bins))
    return float(gap[size > 0].sum() / len(labels))


def first_error(labels_ok: NDArray[np.bool_], real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the first wrong cut in each row, -1 for a row without wrong cut."""
    wrong = ~labels_ok & real
    return np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)


def first_error_f1(drafts: ScoredDrafts, threshold: float) -> dict[str, float]:
    """Return accuracies and F1 of the predicted first error, as in ProcessBench (arXiv 2412.06559).

    A draft's prediction is its first cut below the threshold, or "no error". Drafts with and without an error have
    separate accuracies; `f1` is their harmonic mean. The result omits the accuracy of a missing kind, and then f1.
    """
    truth = first_error(drafts.labels == 1, drafts.real)
    hit = first_error(drafts.scores >= threshold, drafts.real) == truth
    result = {}
    for name, rows in (("erroneous", truth >= 0), ("correct", truth < 0)):
        if rows.any():
            result[f"accuracy_{name}"] = float(hit[rows].mean())
    if len(result) == 2:
        a, b = result.values()
        result["f1"] = 2 * a * b / (a + b) if a + b else 0.0
    return result


def ranking_metrics(drafts: ScoredDrafts, alpha: float) -> dict[str, float]:
    """Return metrics of scores on any scale, at the best thresholds for these drafts.

    AUPRC takes valid prefixes as positives, `auprc_error` invalid prefixes. Both, and AUROC, need both classes.
    """
    scores, labels = drafts.flat
    result = {"acceptance_at_risk": acceptance_at_risk(drafts, alpha)}
    if len(np.unique(labels)) == 2:
        result["auroc"] = float(roc_auc_score(labels, scores))
        result["auprc"] = float(average_precision_score(labels, scores))
        result["auprc_error"] = float(average_precision_score(1 - labels, -scores))
    best = [first_error_f1(drafts, float(t)).get("f1") for t in score_thresholds(drafts, limit=100)]
    if best[0] is not None:
        result["best_first_error_f1"] = max(value for value in best if value is not None)
    return result


def domain_metrics(drafts: ScoredDrafts, domains: Sequence[str | None]) -> dict[str, float]:
    """Return the AUROC within each domain, `auroc_NAME`, where drafts have several domains.

    The AUROC over all drafts also ranks drafts of an easy domain above those of a hard one."""
    names = {domain for domain in domains if domain}
    result = {}
    for name in sorted(names) if len(names) > 1 else ():
        scores, labels = drafts.select([domain == name for domain in domains]).flat
        if len(np.unique(labels)) == 2:
            result[f"auroc_{name}"] = float(roc_auc_score(labels, scores))
    return result


def headline_metrics(drafts: ScoredDrafts, threshold: float = 0.5, alpha: float = 0.05) -> dict[str, float]:
    """Return all metrics of validities (probabilities): ranking, calibration, and decisions at `threshold`."""
    validity, labels = drafts.flat
    result = ranking_metrics(drafts, alpha)
    result["brier"] = float(brier_score_loss(labels, validity, pos_label=1))
    result["ece"] = expected_calibration_error(validity, labels)
    result.update({f"first_error_{name}": value for name, value in first_error_f1(drafts, threshold).items()})
    wrong, acceptance = acceptance_curve(drafts, [threshold])
    result["false_accept_rate"], result["acceptance_rate"] = float(wrong[0]), float(acceptance[0])
    result["valid_share"] = float(labels.mean())
    return result
