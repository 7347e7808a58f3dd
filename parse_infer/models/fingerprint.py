"""Fingerprints that distinguish models of the same shape by a few of their weights.

An adapter works only with the weights it was trained on. A comparison of whole checkpoints would be slow, and a hash
would change with the dtype. A fingerprint therefore lists some weights in bfloat16 precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

_VERSION = "w1"
_SAMPLES = 32  # weights per tensor
_SAME_SHARE = 0.8  # rounding through float16 moves a few per cent of the weights by one unit in the last place


def fingerprint(model: PreTrainedModel) -> str:
    """Return a text of about 400 characters that identifies the model's weights in any dtype.

    Reads 96 numbers from the device.
    """
    layers: list[Any] = [model.get_submodule(name.removesuffix(".weight")) for name in fingerprinted(model)]
    return fingerprint_of([layer.weight.detach() for layer in layers])


def fingerprinted(model: PreTrainedModel) -> list[str]:
    """Return the names of the sampled weights: the input embedding, and the backbone's first and last linear layer."""
    backbone = getattr(model, model.base_model_prefix)
    linears = [module for module in backbone.modules() if isinstance(module, nn.Linear)]
    paths = {module: path for path, module in model.named_modules()}
    sampled: list[nn.Module] = [model.get_input_embeddings(), *linears[:1], *linears[-1:]]
    return [f"{paths[layer]}.weight" for layer in sampled]


def fingerprint_of(weights: Iterable[Tensor | None]) -> str:
    """Compute a fingerprint from the weights that `fingerprinted` names, in order; "-" stands for quantised or unknown
    weights (None)."""
    return ":".join([_VERSION, *("-" if weight is None else _sample(weight) for weight in weights)])


def same_weights(one: str, other: str) -> bool:
    """Whether two fingerprints match up to rounding, in the parts that both have."""
    ours, theirs = one.split(":"), other.split(":")
    if ours[0] != theirs[0] or len(ours) != len(theirs):
        return False
    compared = [(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True) if "-" not in (a, b)]
    return all(_same(a, b) for a, b in compared)


def describe_target(model: PreTrainedModel) -> dict[str, Any]:
    """Build the `target` entry of validity_config.json: name, shape and fingerprint of the adapter's target."""
    return describe_config(model.config, type(model).__name__) | {"fingerprint": fingerprint(model)}


def describe_config(whole: PretrainedConfig, default_name: str) -> dict[str, Any]:
    """Build the entry without the fingerprint, from a configuration alone.

    Args:
        default_name: name for a configuration without `_name_or_path`.
    """
    config = whole.get_text_config(decoder=True)
    # Only the last part of a local path is useful on other machines.
    path = (whole._name_or_path or "").rstrip("/")
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    name = path if is_hub_id else path.rsplit("/", 1)[-1]
    return {
        "name": name or default_name,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }


def _sample(tensor: Tensor) -> str:
    """Format evenly spread weights as bfloat16, four hexadecimal digits each; "-" for a quantised tensor."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return "-"
    flat = tensor.reshape(-1)
    index = torch.linspace(0, flat.numel() - 1, _SAMPLES + 2, dtype=torch.float64).long()[1:-1]
    values = flat[index.to(flat.device)].to("cpu", torch.bfloat16).view(torch.int16)
    return "".join(f"{v & 0xFFFF:04x}" for v in values.tolist())


def _same(one: str, other: str) -> bool:
    a, b = ([int(text[i : i + 4], 16) for i in range(0, len(text), 4)] for text in (one, other))
    if len(a) != len(b) or not a:
        return False
    equal = sum(x == y for x, y in zip(a, b, strict=True))
    return equal >= _SAME_SHARE * len(a)
