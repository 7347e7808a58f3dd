"""Platt scaling of validities: of the prefixes with validity 0.8, four in five should be valid.

A head learns to rank prefixes, but its confidence depends on the length of training. Two numbers fitted on held-out
drafts calibrate the head (Platt 1999): validity = sigmoid(scale * logit + shift). Scaling keeps the order of prefixes,
and therefore every decision at the scaled threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GroupKFold, cross_val_predict

from parse_train.judge.metrics import Floats, ScoredDrafts, expected_calibration_error

_FOLDS = 5
_EDGE = 1e-12  # validities are clipped to this distance from 0 and 1 before the logit


@dataclass(frozen=True)
class Probabilities:
    """validity = sigmoid(scale * logit + shift).

    `ece_before` and `ece` are the calibration errors before and after. `ece` is cross-validated over problems, as is
    `of_left_out`: the validities of all real cuts, each from a fit without its problem (None without a change)."""

    scale: float = 1.0
    shift: float = 0.0
    ece_before: float = 0.0
    ece: float = 0.0
    of_left_out: Floats | None = field(default=None, compare=False)

    @property
    def changes(self) -> bool:
        return (self.scale, self.shift) != (1.0, 0.0)

    def of(self, validity: Floats) -> Floats:
        return 1 / (1 + np.exp(-(self.scale * _logit(validity) + self.shift))) if self.changes else validity

    def of_drafts(self, drafts: ScoredDrafts) -> ScoredDrafts:
        return replace(drafts, scores=np.where(drafts.real, self.of(drafts.scores), 0.0))

    def left_out(self, drafts: ScoredDrafts) -> ScoredDrafts:
        """Return the drafts of the fit with cross-validated validities, whose calibration error is `ece`."""
        if self.of_left_out is None:
            return drafts
        scores = np.zeros_like(drafts.scores)
        scores[drafts.real] = self.of_left_out
        return replace(drafts, scores=scores)

    def of_threshold(self, threshold: float) -> float:
        """Scale a threshold; a threshold that accepts everything or nothing is unchanged."""
        return float(self.of(np.array([threshold]))[0]) if 0 < threshold < 1 else threshold

    def to_dict(self) -> dict[str, float] | None:
        """Return the entry for validity_config.json; None without a change."""
        return {"scale": self.scale, "shift": self.shift} if self.changes else None


def fit_probabilities(drafts: ScoredDrafts, problems: Sequence[str]) -> Probabilities:
    """Fit scale and shift, and use them only if they lower the cross-validated log loss.

    Args:
        drafts: validities of held-out drafts.
        problems: the problem of each draft; no problem is in two folds.
    """
    validity, labels = drafts.flat
    owners = np.repeat(np.asarray(problems), drafts.real.sum(axis=1))
    before = expected_calibration_error(validity, labels)
    nothing = Probabilities(ece_before=before, ece=before)
    if len(np.unique(owners)) < _FOLDS or len(np.unique(labels)) < 2:
        return nothing
    logits, model = _logit(validity)[:, None], LogisticRegression(C=1e6)
    try:
        left_out = cross_val_predict(
            model, logits, labels, groups=owners, cv=GroupKFold(_FOLDS), method="predict_proba"
        )[:, 1]
    except ValueError:  # a fold without one of the classes
        return nothing
    model.fit(logits, labels)
    scale, shift = float(model.coef_[0, 0]), float(model.intercept_[0])
    if scale <= 0 or log_loss(labels, left_out) >= log_loss(labels, np.clip(validity, _EDGE, 1 - _EDGE)):
        return nothing
    return Probabilities(scale, shift, before, expected_calibration_error(left_out, labels), left_out)


def _logit(validity: Floats) -> Floats:
    inside = np.clip(validity, _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)
