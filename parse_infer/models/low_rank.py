"""peft's LoRA files: the linear layers that they update, and the low-rank updates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parse_infer.errors import ModelError

_PREFIX = "base_model.model."
# peft options that change the update; a LoRA with one of them is rejected.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
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
class LowRankUpdate:
    """Update `W += b @ a` of one layer with weight W [out, in] (transposed in a Conv1D)."""

    path: str
    layer: nn.Linear | Conv1D
    a: Tensor
    """[rank, in], as stored."""
    b: Tensor
    """[out, rank], float32, with the scaling inside."""


def check_options(config: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
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
