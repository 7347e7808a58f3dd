"""The adapter's low-rank update, added to the trailing probe tokens of one forward and to nothing else.

Reads peft's activated-LoRA files (`alora_invocation_tokens`). peft's own forward finds its tokens with a boolean mask,
a device synchronisation in every layer, and leaves wrapped linears behind that tax plain decoding. Here the update is
a slice: `y[..., -n:, :] += x[..., -n:, :] @ A.T @ B.T * scaling`, and outside `applied` the model is untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_PREFIX = "base_model.model."
# Options of peft that change what the update is; an adapter that uses one is refused, never half applied.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "velora_config",
    "monteclora_config",
    "arrow_config",
)


class ProbeLoRA:
    """Low-rank updates of some of a model's linear layers, switched on for the last n positions by `applied(n)`.

    Args:
        updates: for each adapted layer, (layer, A [r, in], B [out, r]) with the scaling already inside B.
    """

    def __init__(self, updates: list[tuple[nn.Linear, Tensor, Tensor]]) -> None:
        self._updates = updates

    @classmethod
    def from_peft(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: PreTrainedModel) -> ProbeLoRA:
        """Build from the content of `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            ValueError: not an activated LoRA, an unsupported peft option, a layer that the model does not have or the
                file does not hold, or a tensor whose shape does not fit the layer.
        """
        _check_config(config)
        name = type(model).__name__
        modules = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        paths = _adapted_paths(tensors)
        for path in paths:
            if path not in modules:
                raise ValueError(f"the adapter has weights for {path}, which is no linear layer of the {name}")
            if modules[path] is model.get_output_embeddings():
                raise ValueError(f"the adapter changes the output layer {path}, which a probe never reaches")
        missing = sorted(_targeted(config, modules) - set(paths))
        if missing:
            raise ValueError(f"the adapter has no weights for {missing[0]} ({len(missing)} of its layers are missing)")
        updates = []
        for path in paths:
            module = modules[path]
            a, b = (tensors[f"{_PREFIX}{path}.lora_{part}.weight"] for part in "AB")
            fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
            if not fits or (b.shape[0], a.shape[1]) != (module.out_features, module.in_features):
                raise ValueError(
                    f"the adapter's weights for {path} have shapes {tuple(a.shape)} and {tuple(b.shape)}, but the "
                    f"{name}'s layer maps {module.in_features} to {module.out_features}"
                )
            weight = module.weight
            dtype = weight.dtype if weight.is_floating_point() else model.dtype  # quantised layers compute in it
            if weight.device.type == "cpu":  # small products in bfloat16 are slower there
                dtype = torch.float32
            scaled = b.float() * _scaling(config, path, rank=a.shape[0])
            updates.append((module, a.to(weight.device, dtype), scaled.to(weight.device, dtype)))
        return cls(updates)

    @contextmanager
    def applied(self, n: int) -> Iterator[None]:
        """Within the `with`, add the update to the last `n` positions of every forward. Always undone at the end.

        Args:
            n: number of trailing positions, at least 1.
        """
        if n < 1:
            raise ValueError(f"the adapter applies to at least one position, not {n}")
        before = [module.__dict__.get("forward") for module, _, _ in self._updates]
        try:
            for module, a, b in self._updates:
                module.__dict__["forward"] = _with_update(module.forward, a, b, n)
            yield
        finally:
            for (module, _, _), forward in zip(self._updates, before, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:  # somebody else's, such as accelerate's offloading
                    module.__dict__["forward"] = forward


def _with_update(forward: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, n: int) -> Callable[[Tensor], Tensor]:
    def adapted(x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(
                "an adapted layer sees tokens without their order (mixture-of-experts layers do), so the probe tokens "
                "cannot be told apart: adapt the attention layers only"
            )
        y = forward(x)
        if len(x) == 1:  # two products of matrices: half the time of the general form below
            rows = y[0, -n:]
            rows.copy_(torch.addmm(rows.to(a.dtype), x[0, -n:].to(a.dtype) @ a.T, b.T))
        else:
            y[..., -n:, :] += nn.functional.linear(nn.functional.linear(x[..., -n:, :].to(a.dtype), a), b).to(y.dtype)
        return y

    return adapted


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter_config.json describes a {config.get('peft_type')} adapter: only LORA can be loaded")
    if not config.get("alora_invocation_tokens"):
        raise ValueError(
            "adapter_config.json has no alora_invocation_tokens: an ordinary LoRA, active on the whole text, "
            "cannot be applied to the probes alone"
        )
    used = [key for key in _UNSUPPORTED if config.get(key)]
    used += ["bias"] if config.get("bias", "none") != "none" else []
    used += ["init_lora_weights"] if isinstance(config.get("init_lora_weights"), str) and _mutates_base(config) else []
    if used:
        raise ValueError(f"adapter_config.json sets {used[0]}={config[used[0]]!r}, which is not supported")


def _mutates_base(config: Mapping[str, Any]) -> bool:
    """Some initialisations move part of the base weights into the adapter (PiSSA, OLoRA, CorDA, LoftQ, …)."""
    return config["init_lora_weights"] not in ("gaussian", "eva", "orthogonal", "true", "false")


def _adapted_paths(tensors: Mapping[str, Tensor]) -> list[str]:
    """Paths of the adapted layers, from tensor names `base_model.model.<path>.lora_A.weight` (and lora_B)."""
    parts: dict[str, set[str]] = {}
    for key in tensors:
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight", key)
        if match is None:
            raise ValueError(f"the adapter holds {key!r}, which is no weight of a plain LoRA")
        parts.setdefault(match[1], set()).add(match[2])
    if not parts:
        raise ValueError("the adapter holds no weights")
    for path, present in parts.items():
        if present != {"A", "B"}:
            raise ValueError(f"the adapter has only one of the two matrices of {path}")
    return list(parts)


def _targeted(config: Mapping[str, Any], modules: Mapping[str, nn.Linear]) -> set[str]:
    """Layers that `target_modules` names (peft's rule: exact path or path suffix; a text is a regular expression)."""
    targets = config.get("target_modules") or []
    if config.get("layers_to_transform") is not None or config.get("exclude_modules") or targets == "all-linear":
        return set()
    if isinstance(targets, str):
        return {path for path in modules if re.fullmatch(targets, path)}
    return {path for path in modules if any(path == t or path.endswith(f".{t}") for t in targets)}


def _scaling(config: Mapping[str, Any], path: str, rank: int) -> float:
    """lora_alpha / rank (or its root for rank-stabilised LoRA), with peft's patterns for single layers."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
