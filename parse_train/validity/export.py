"""Export of a trained adapter as a folder for `parse_infer`, with figures and model card."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_train.validity.activated_lora import ADAPTER
from parse_train.validity.figures import png
from parse_train.validity.model import ValidityModel
from parse_train.validity.pass_risk import RiskControl


def export_adapter(
    folder: str | Path,
    model: ValidityModel,
    facts: ValidityConfig,
    metrics: Mapping[str, float],
    risk: RiskControl | None = None,
    figures: Mapping[str, Figure] | None = None,
    train_problems: Collection[str] = (),
    probability: dict[str, float] | None = None,
) -> Path:
    """Write the adapter folder, replacing an existing adapter, and return its path.

    Args:
        facts: what is known before the training: target, verbalizer, cut policy, label and provenance.
        metrics: held-out figures for the model card.
        risk: source of the threshold; None exports no threshold.
        figures: saved as NAME.png and shown in the model card.
        train_problems: `prompt_hash` of every training prompt.
        probability: as in `ValidityConfig`; metrics and threshold apply to validities after this scaling.

    Raises:
        ValueError: `folder` holds other files than an adapter.
    """
    config = replace(
        facts,
        probe_ids=model.probe.ids,
        probe_text=model.probe.text,
        closes_turn=model.probe.closes_turn,
        token_rank=model.token_rank,
        surprise_vocab_size=model.surprise_vocab_size,
        probability=probability,
        threshold=None if risk is None else risk.threshold,
        risk=None if risk is None else risk.to_dict(),
        metrics={name: round(value, 5) for name, value in metrics.items()},
    )
    peft_model = model.peft_model
    peft_config = {} if peft_model is None else peft_model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    adapter = ValidityAdapter(
        config, model.exported_head(), None, peft_config, model.adapter_tensors(), frozenset(train_problems)
    )
    return adapter.save_pretrained(folder, {name: png(figure) for name, figure in (figures or {}).items()})
