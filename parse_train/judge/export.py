"""Export of a trained adapter as a folder for `parse_infer`, with figures and model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from parse_infer.judge.adapter import ValidityAdapter
from parse_train.judge.figures import png
from parse_train.judge.pass_risk import RiskControl


def export_adapter(
    folder: str | Path,
    adapter: ValidityAdapter,
    metrics: Mapping[str, float],
    risk: RiskControl | None = None,
    figures: Mapping[str, Figure] | None = None,
    probability: dict[str, float] | None = None,
) -> Path:
    """Write the adapter folder, replacing an existing adapter, and return its path.

    Args:
        adapter: as trained, without threshold and metrics.
        metrics: held-out figures for the model card.
        risk: source of the threshold; None exports no threshold.
        figures: saved as NAME.png and shown in the model card.
        probability: as in `ValidityConfig`; metrics and threshold apply to validities after this scaling.

    Raises:
        ValueError: `folder` holds other files than an adapter.
    """
    config = replace(
        adapter.config,
        probability=probability,
        threshold=None if risk is None else risk.threshold,
        risk=None if risk is None else risk.to_dict(),
        metrics={name: round(value, 5) for name, value in metrics.items()},
    )
    pictures = {name: png(figure) for name, figure in (figures or {}).items()}
    return replace(adapter, config=config).save_pretrained(folder, pictures)
