"""Figures of the model card and the tracker, as matplotlib figures outside pyplot's global state."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from parse_train.judge.metrics import ScoredDrafts, acceptance_curve, expected_calibration_error, score_thresholds


def reliability_diagram(drafts: ScoredDrafts, n_bins: int = 10) -> Figure:
    """Plot the share of valid prefixes over validity (left axis), and the number of prefixes (right axis, bars)."""
    validity, labels = drafts.flat
    bins = np.minimum((validity * n_bins).astype(int), n_bins - 1)
    size = np.bincount(bins, minlength=n_bins)
    some = size > 0
    mean = np.bincount(bins, validity, n_bins)[some] / size[some]
    frequency = np.bincount(bins, labels, n_bins)[some] / size[some]
    figure = Figure(figsize=(4.5, 4.0), layout="constrained")
    axes = figure.subplots()
    counts = axes.twinx()
    counts.bar((np.arange(n_bins) + 0.5) / n_bins, size, width=0.9 / n_bins, color="0.88", zorder=0)
    counts.set_ylabel("prefixes")
    axes.set_zorder(counts.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.plot([0, 1], [0, 1], "--", color="0.5", linewidth=1)
    axes.plot(mean, frequency, "o-", color="C0")
    axes.set(xlabel="validity", ylabel="share that is valid", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(f"ECE {expected_calibration_error(validity, labels):.3f}")
    return figure


def acceptance_figure(
    curves: Mapping[str, ScoredDrafts], alpha: float, chosen: tuple[float, float] | None = None
) -> Figure:
    """Plot acceptance rate over false-accept rate at all thresholds, one line per kind of score.

    `chosen` is the false-accept rate and acceptance rate of the selected threshold.
    """
    figure = Figure(figsize=(5.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, drafts in curves.items():
        wrong, acceptance = acceptance_curve(drafts, score_thresholds(drafts, limit=200))
        axes.plot(wrong, acceptance, label=name)
    axes.axvline(alpha, color="0.7", linewidth=1, linestyle=":", label=f"α = {alpha:g}")
    if chosen is not None:
        axes.plot(*chosen, "k*", markersize=11, label="chosen threshold")
    axes.set(xlabel="false-accept rate (share of drafts)", ylabel="acceptance rate (share of tokens)")
    axes.set(xlim=(0, None), ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize="small")
    return figure


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
