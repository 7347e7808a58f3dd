"""Write a trained adapter as the folder that `parse_infer` loads, with its figures and model card."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_train.validity.figures import png
from parse_train.validity.model import ValidityModel
from parse_train.validity.pass_risk import RiskControl
from parse_train.validity.trailing_lora import ADAPTER


@dataclass(frozen=True)
class AdapterFacts:
    """What the exported folder says about the adapter beside its weights; fields as in `ValidityConfig`.

    `target` must have been described before the target was wrapped.
    """

    target: dict[str, Any]
    verbalizer: tuple[str, str] | None
    cut_policy: dict[str, Any]
    label: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


def export_adapter(
    folder: str | Path,
    model: ValidityModel,
    facts: AdapterFacts,
    metrics: Mapping[str, float],
    risk: RiskControl | None = None,
    figures: Mapping[str, Figure] | None = None,
    train_problems: Collection[str] = (),
    probability: dict[str, float] | None = None,
) -> Path:
    """Write the adapter folder (an adapter there already is replaced) and return it.

    Args:
        metrics: held-out figures for the model card.
        risk: where the threshold comes from; without it, none is written.
        figures: saved as NAME.png and shown in the model card.
        train_problems: `prompt_hash` of every prompt that was learnt from.
        probability: as in `ValidityConfig`; metrics and threshold are those of the validities that it gives.

    Raises:
        ValueError: `folder` holds something else than an adapter.
    """
    config = ValidityConfig(
        probe_ids=model.probe.ids,
        probe_text=model.probe.text,
        closes_turn=model.probe.closes_turn,
        token_rank=model.token_rank,
        surprise_vocab_size=model.surprise_vocab_size,
        **asdict(facts),
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
