"""Read and atomically write the files of an exported adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from safetensors.torch import save_file
from torch import Tensor

from parse_infer.errors import ModelError
from parse_infer.files import lies_below, locate, read_json, read_tensors, replacing_folder
from parse_infer.models.names import hub_id
from parse_infer.models.train_problems import TRAIN_PROBLEMS, read_train_problems, write_train_problems
from parse_infer.settings.acceptance import describe_threshold

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
HEAD = "validity_head.safetensors"
CONFIG = "validity_config.json"
CARD = "README.md"
_DEFAULTS = ("threshold", "risk")  # keys of validity_config.json that the fingerprint leaves out
WAY_OUT = "export or download the adapter again"
PROMISE = "one verification pass over one whole draft per problem; several passes over blocks are not covered"
"""Scope of a threshold's risk level."""


@dataclass(frozen=True)
class AdapterFiles:
    """Content of an adapter folder; only one with a second stream has peft files."""

    folder: Path
    peft_config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: dict[str, Tensor]
    validity_config: dict[str, Any]
    train_problems: frozenset[str]

    @property
    def fingerprint(self) -> str:
        """Identifies the judge (`judge_fingerprint`)."""
        return judge_fingerprint((self.peft_config, self.validity_config), (self.tensors, self.head))


def judge_fingerprint(configs: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Tensor]]) -> str:
    """Hash all tensors of a judge, and its configurations without the default threshold and its risk.

    Calibrations store the thresholds of their own promises, so another default leaves them valid.
    """
    lasting = [{key: value for key, value in config.items() if key not in _DEFAULTS} for config in configs]
    digest = hashlib.sha256(json.dumps(lasting, sort_keys=True, default=_as_json).encode())
    for tensors in parts:
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def adapts(validity_config: Mapping[str, Any]) -> bool:
    """Whether the adapter with this validity_config.json has a second stream, and so a LoRA."""
    stream = validity_config.get("stream")
    head = stream.get("head") if isinstance(stream, dict) else {}  # `ValidityConfig.from_dict` refuses other types
    return bool(stream) and bool((head or {}).get("second", True))


def read_adapter(name_or_path: str | Path) -> AdapterFiles:
    """Read a local folder, or a Hugging Face id through the Hub's cache.

    Raises:
        FileNotFoundError: the folder or id does not exist, or a file is missing.
        ValueError: a file is damaged.
    """
    folder = locate(name_or_path, (PEFT_CONFIG, PEFT_WEIGHTS, HEAD, CONFIG, CARD, TRAIN_PROBLEMS), "adapter")

    def check(*names: str) -> None:
        for name in names:
            if not (folder / name).is_file():
                if below := lies_below(folder, CONFIG):
                    raise FileNotFoundError(f"{name_or_path} is not the folder of the adapter{below}")
                raise FileNotFoundError(
                    f"{name_or_path} is no complete validity adapter: {name} is missing (an interrupted export, or "
                    "another kind of LoRA?)"
                )

    check(CONFIG, HEAD)
    config = read_json(folder / CONFIG, WAY_OUT)
    has_lora = adapts(config)
    if has_lora:
        check(PEFT_CONFIG, PEFT_WEIGHTS)
    return AdapterFiles(
        folder=folder.absolute(),
        peft_config=read_json(folder / PEFT_CONFIG, WAY_OUT) if has_lora else {},
        tensors=read_tensors(folder / PEFT_WEIGHTS, WAY_OUT) if has_lora else {},
        head=read_tensors(folder / HEAD, WAY_OUT),
        validity_config=config,
        train_problems=read_train_problems(folder),
    )


def write_adapter(
    folder: Path,
    peft_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    validity_config: Mapping[str, Any],
    figures: Mapping[str, bytes],
    train_problems: Iterable[str] = (),
) -> Path:
    """Write an adapter folder; replace an existing adapter atomically.

    Args:
        peft_config, tensors: both empty without a second stream; the folder then has no peft files.
        figures: PNG files by name, shown in the model card.
        train_problems: hashes of the training prompts, which calibrations must exclude.

    Raises:
        ValueError: `folder` exists and is no adapter folder.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and not ((folder / CONFIG).is_file() or (folder.is_dir() and not any(folder.iterdir()))):
        raise ModelError(f"{folder} exists and is no adapter folder: choose another folder, or empty it first")
    with replacing_folder(folder) as beside:
        contents = {CONFIG: validity_config}
        if tensors:
            save_file(_plain(tensors), beside / PEFT_WEIGHTS, metadata={"format": "pt"})
            contents[PEFT_CONFIG] = peft_config
        save_file(_plain(head), beside / HEAD, metadata={"format": "pt"})
        for name, content in contents.items():
            text = json.dumps(dict(content), indent=2, ensure_ascii=False, default=_as_json)
            (beside / name).write_text(text + "\n", encoding="utf-8")
        for name, png in figures.items():
            (beside / f"{name}.png").write_bytes(png)
        if train_problems:
            write_train_problems(beside, train_problems)
        (beside / CARD).write_text(model_card(validity_config, list(figures)), encoding="utf-8")
    return folder


def model_card(config: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """Render README.md of an adapter from its validity_config.json and the names of its figures.

    Its front matter is that of the Hub's model cards, except for the licence, which its publisher adds.
    """
    target, threshold, has_lora = config["target"], config.get("threshold"), adapts(config)
    front = ModelCardData(
        base_model=hub_id(target["name"]),
        library_name="peft" if has_lora else "parse-engine",
        pipeline_tag="text-generation",
        tags=["parse-engine", "speculative-decoding", *(["lora"] if has_lora else [])],
    )
    rows = [f"| {key} | {_shown(value)} |" for key, value in config.get("metrics", {}).items()]
    metrics = ["", "## Held-out figures", "", "| metric | value |", "|---|---|", *rows] if rows else []
    shown = ["", "## Figures", "", *(f"![{name}]({name}.png)" for name in figures)] if figures else []
    facts = {
        "target": f"{target['name']} ({target['model_type']}, {target['num_hidden_layers']} layers)",
        "reads": _reads(config),
        "cuts": json.dumps(config.get("cut_policy", {})),
        "label": json.dumps(config.get("label", {}), ensure_ascii=False),
        "threshold": "not calibrated" if threshold is None else describe_threshold(threshold),
        "risk": json.dumps(config.get("risk")) + _scope(config),
        "provenance": json.dumps(config.get("provenance", {}), ensure_ascii=False),
    }
    return "\n".join(
        [
            "---",
            front.to_yaml(),
            "---",
            f"# Validity adapter for {target['name']}",
            "",
            "Estimates, for every prefix of a draft answer, the probability that the target still reaches a correct",
            "answer from there. Use it with `parse_infer.ParseEngine.from_pretrained(target, draft, adapter)`.",
            "",
            *(f"- {key}: {value}" for key, value in facts.items()),
            *metrics,
            *shown,
            "",
        ]
    )


def _reads(config: Mapping[str, Any]) -> str:
    head = (config.get("stream") or {}).get("head", {})
    layers = ", ".join(map(str, head.get("layers") or ()))
    more = [f"its hidden states (layers {layers})"] if layers else []
    return " and ".join(["the target's log-probabilities", *more, *(["a second stream"] if adapts(config) else [])])


def _scope(config: Mapping[str, Any]) -> str:
    """What the risk level covers. Early versions counted several drafts per problem."""
    risk, problems = config.get("risk"), config.get("provenance", {}).get("eval_problems")
    if not risk:
        return ""
    scope = PROMISE
    if problems is not None and risk["n_drafts"] > problems:
        scope += f"; {risk['n_drafts']} drafts of {problems} problems counted as independent, so the bound is too low"
    if risk["threshold"] != config.get("threshold"):
        scope = f"not of the threshold above; {scope}"
    return f" ({scope})"


def _as_json(value: object) -> object:
    """Convert the sets and enumerations in peft's configuration."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "value"):
        return value.value
    raise TypeError(f"{value!r} cannot be written as JSON")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
