"""peft's LoRA files: the low-rank updates of linear layers, and plain LoRAs as language models.

A plain LoRA is merged into the weights of the base that it names. It then costs nothing at run time, and the packed
pass runs ordinary linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parse_infer.errors import ModelError
from parse_infer.files import read_json, read_tensors, write_json
from parse_infer.models.fingerprint import describe_target, fingerprint, same_weights

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_VALIDITY_CONFIG = "validity_config.json"  # a validity adapter may hold a LoRA too, for its second stream alone
_BASE = "base_model.json"
_TEMPLATE = "chat_template.jinja"
_WAY_OUT = "export or download the LoRA again"

_PREFIX = "base_model.model."
# peft options that change the update; a LoRA with one of them is rejected.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)


@dataclass(frozen=True)
class Lora:
    """A LoRA folder: peft's two files, and optionally `base_model.json`, a tokenizer and `chat_template.jinja`."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.config["base_model_name_or_path"]

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    @property
    def chat_template(self) -> str | None:
        """Chat template that replaces the base's, for a LoRA without a tokenizer."""
        path = self.folder / _TEMPLATE
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def merge_into(self, model: PreTrainedModel) -> None:
        """Add the update to the weights of `model` in float32, and round to their dtype once.

        Raises:
            ValueError: the LoRA was trained on another model, or the weights are quantised or shared.
        """
        self.check_base(fingerprint(model), self.base)
        try:
            updates = low_rank_updates(self.config, self.tensors(), model)
        except ValueError as error:
            raise ModelError(f"The LoRA {self.folder} does not fit its base {self.base!r}: {error}.") from error
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        tied = output is not None and output.weight is embedding.weight
        for update in updates:
            weight = update.layer.weight
            if not weight.is_floating_point() or weight.element_size() < 2:
                raise ModelError(
                    f"The weights of {self.base!r} are quantised: the LoRA {self.folder} cannot be merged."
                )
            if update.layer is output and tied:
                raise ModelError(
                    f"The LoRA {self.folder} changes {update.path}, which {self.base!r} shares with its embedding: "
                    f"merging would change both."
                )
        with torch.no_grad():
            for update in updates:
                weight = update.layer.weight
                change = update.b.to(weight.device) @ update.a.to(weight.device, torch.float32)
                weight.copy_(weight.float() + (change.T if isinstance(update.layer, Conv1D) else change))

    def check_base(self, weights: str, name: str) -> None:
        """Raise ValueError if the LoRA was trained on weights with another fingerprint than `weights`."""
        base = self._base_description()
        if base and not same_weights(base["fingerprint"], weights):
            raise ModelError(
                f"The LoRA {self.folder} was trained on {base.get('name')!r}, and {name!r} has other weights."
            )

    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / _WEIGHTS, _WAY_OUT)

    def _base_description(self) -> dict[str, Any]:
        path = self.folder / _BASE
        content = read_json(path, _WAY_OUT) if path.is_file() else {}
        if content and not isinstance(content.get("fingerprint"), str):
            raise ModelError(f"{path} is damaged, it holds no fingerprint: {_WAY_OUT}")
        return content


def is_lora(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether the folder is a validity adapter, with or without a LoRA."""
    return (folder / _VALIDITY_CONFIG).is_file()


def not_a_model(adapter: Path) -> ModelError:
    return ModelError(f"{adapter} is a validity adapter, not a language model: pass it as the adapter.")


def read_lora(folder: Path) -> Lora:
    """Check a LoRA's files and options. `merge_into` reads the tensors later.

    Raises:
        FileNotFoundError: the weights are missing.
        ValueError: a damaged file, a validity adapter, or a LoRA that cannot be merged.
    """
    if is_adapter(folder):
        raise not_a_model(folder)
    config = read_json(folder / _CONFIG, _WAY_OUT)
    try:
        check_lora_options(config)
    except ValueError as error:
        raise ModelError(f"The LoRA {folder} cannot be merged into its base: {error}.") from error
    if not isinstance(config.get("base_model_name_or_path"), str) or not config["base_model_name_or_path"]:
        raise ModelError(f"{folder / _CONFIG} does not name the LoRA's base model (base_model_name_or_path)")
    if not (folder / _WEIGHTS).is_file():
        raise FileNotFoundError(f"The LoRA {folder} is not complete: {_WEIGHTS} is missing (an interrupted export?).")
    return Lora(folder, config)


def describe_base(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Describe a LoRA's base model for `write_base`, before peft wraps the model."""
    return describe_target(model) | {"name": name}


def write_base(folder: Path, base: Mapping[str, Any]) -> None:
    """Record the base model in a LoRA folder, so that loading rejects other weights."""
    write_json(folder / _BASE, dict(base))


@dataclass(frozen=True)
class LowRankUpdate:
    """Update `W += b @ a` of one layer with weight W [out, in] (transposed in a Conv1D)."""

    path: str
    layer: nn.Linear | Conv1D
    a: Tensor
    """[rank, in], as stored."""
    b: Tensor
    """[out, rank], float32, with the scaling inside."""


def check_lora_options(config: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise ValueError for an adapter_config.json of another adapter type or with an unsupported option.

    Args:
        also: further unsupported options.
    """
    if config.get("peft_type") != "LORA":
        raise ModelError(f"adapter_config.json describes a {config.get('peft_type')} adapter: only LORA can be loaded")
    used = [key for key in (*_UNSUPPORTED, *also) if config.get(key)]
    used += ["bias"] if config.get("bias", "none") != "none" else []
    used += ["init_lora_weights"] if isinstance(config.get("init_lora_weights"), str) and _mutates_base(config) else []
    if used:
        raise ModelError(f"adapter_config.json sets {used[0]}={config[used[0]]!r}, which is not supported")


def low_rank_updates(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: PreTrainedModel
) -> list[LowRankUpdate]:
    """Read the updates of `model`'s layers from `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: a layer missing in the model or in the file, or a tensor whose shape does not match the layer.
    """
    name = type(model).__name__
    # Like peft, use the layer's type for a Conv1D (GPT-2), not fan_in_fan_out.
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    paths = _adapted_paths(tensors)
    for path in paths:
        if path not in layers:
            raise ModelError(f"the adapter has weights for {path}, which is no linear layer of {name}")
    missing = sorted(_targeted(config, layers) - set(paths))
    if missing:
        raise ModelError(f"the adapter has no weights for {missing[0]} ({len(missing)} of its layers are missing)")
    updates = []
    for path in paths:
        layer = layers[path]
        n_in, n_out = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
        a, b = (tensors[f"{_PREFIX}{path}.lora_{part}.weight"] for part in "AB")
        fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
        if not fits or (b.shape[0], a.shape[1]) != (n_out, n_in):
            raise ModelError(
                f"the adapter's weights for {path} have shapes {tuple(a.shape)} and {tuple(b.shape)}, but the "
                f"{name}'s layer maps {n_in} to {n_out}"
            )
        updates.append(LowRankUpdate(path, layer, a, b.float() * _scaling(config, path, rank=a.shape[0])))
    return updates


def _mutates_base(config: Mapping[str, Any]) -> bool:
    """Whether the initialisation moves part of the base weights into the adapter (PiSSA, OLoRA, CorDA, LoftQ, …)."""
    return config["init_lora_weights"] not in ("gaussian", "eva", "orthogonal", "true", "false")


def _adapted_paths(tensors: Mapping[str, Tensor]) -> list[str]:
    """Extract the adapted layers' paths from tensor names `base_model.model.<path>.lora_A.weight` (and lora_B)."""
    parts: dict[str, set[str]] = {}
    for key in tensors:
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight", key)
        if match is None:
            raise ModelError(f"the adapter holds {key!r}, which is no weight of a plain LoRA")
        parts.setdefault(match[1], set()).add(match[2])
    if not parts:
        raise ModelError("the adapter holds no weights")
    for path, present in parts.items():
        if present != {"A", "B"}:
            raise ModelError(f"the adapter has only one of the two matrices of {path}")
    return list(parts)


def _targeted(config: Mapping[str, Any], layers: Mapping[str, nn.Module]) -> set[str]:
    """Match layers against `target_modules` by peft's rule: exact path or suffix; a string is a regular expression."""
    targets = config.get("target_modules") or []
    if config.get("layers_to_transform") is not None or config.get("exclude_modules") or targets == "all-linear":
        return set()
    if isinstance(targets, str):
        return {path for path in layers if re.fullmatch(targets, path)}
    return {path for path in layers if any(path == t or path.endswith(f".{t}") for t in targets)}


def _scaling(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return lora_alpha / rank (its root for rank-stabilised LoRA), with peft's patterns for single layers."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
