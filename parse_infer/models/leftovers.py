"""Refuse checkpoints whose tensors a model would not use, because its logits would be others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from parse_infer.errors import ModelError
from parse_infer.models.architecture import decoder_layers


def check_quantisation(config: PretrainedConfig, shown: str) -> None:
    """Raise ValueError for a method of quantisation that transformers does not know: it would ignore the scales.

    Args:
        shown: the model, for the message.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    bits = isinstance(stored, dict) and (stored.get("load_in_4bit") or stored.get("load_in_8bit"))
    if not bits and str(getattr(method, "value", method)) not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(
            f"{shown} is quantised by {method!r}, which transformers does not know: name the model that it was made "
            "from, or serve it with an engine that knows the method"
        )


def check_leftovers(model: PreTrainedModel, keys: Iterable[str], shown: str) -> None:
    """Raise ValueError if a checkpoint has tensors that belong to the language model, and the model does not use them.

    Towers of other kinds of input, other heads and layers that predict several tokens (MTP) may stay unused. All else
    means that the configuration lacks a switch, for example for biases, or that scales would be ignored.

    Args:
        keys: names of the unused tensors.
        shown: the model, for the message.
    """
    layers = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is layers)
    buffers = {name for name, _ in model.named_buffers()}  # older checkpoints hold some, such as causal masks
    lost, beyond = [], dict[str, list[str]]()
    for key in sorted(set(keys) - buffers):
        number, _, name = key.removeprefix(f"{path}.").partition(".")
        if not key.startswith(f"{path}."):
            lost += [key] if _is_inside(model, key, path) else []
        elif number.isdecimal() and int(number) >= len(layers):
            beyond.setdefault(number, []).append(name)
        elif not name.endswith("masked_bias"):
            lost.append(key)
    own = {name.partition(".")[2] for name, _ in layers.named_parameters()}
    for number, names in beyond.items():  # an ordinary layer, where one for MTP has tensors of its own
        lost += [f"{path}.{number}.{name}" for name in names] if own.issuperset(names) else []
    if lost:
        raise ModelError(
            f"{shown} has {len(lost)} tensors that its configuration has no place for, the first is {lost[0]!r}: "
            "correct config.json, or name the model that this one was made from"
        )


def _is_inside(model: nn.Module, key: str, layers: str) -> bool:
    """Whether a tensor lies in an existing module that does not hold the layers, such as the final norm."""
    parent, _, _ = key.rpartition(".")
    while parent and not _exists(model, parent):
        parent, _, _ = parent.rpartition(".")
    return bool(parent) and not f"{layers}.".startswith(f"{parent}.")


def _exists(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
