"""What a GGUF file says of a model beyond what transformers reads: the scaling of RoPE, and biases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from parse_infer.errors import ModelError

_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PREFIX = "rope.scaling."
_PARAMETERS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_NEUTRAL = {"finetuned": True, "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}  # switches of configurations


def completed(config: PretrainedConfig, file: Path) -> PretrainedConfig:
    """Return the configuration that transformers reads from a GGUF file, with RoPE scaling and switches for biases.

    Raises:
        ValueError: the scaling is of an unknown kind, or the model would not use some tensors.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    values = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.rope.")
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    scaling = _scaling(values, file)
    if _FACTORS in tensors:
        stored = tensors[_FACTORS]
        factors = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).flatten()
        scaling = scaling or _llama3_scaling(factors, config, file)
    if scaling:
        _add_scaling(config, scaling, file)
    for switch, name in _BIASES.items():
        if hasattr(config, switch) and any(tensor.endswith(f".{name}") for tensor in tensors):
            setattr(config, switch, True)
    _check_tensors(config, architecture, set(tensors) - {_FACTORS, "output.weight"}, file)
    return config


def _scaling(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the RoPE parameters of the file's scaling; none for RoPE without scaling."""
    given = {"type": "linear", "factor": values["rope.scale_linear"]} if "rope.scale_linear" in values else {}
    given |= {key.removeprefix(_PREFIX): value for key, value in values.items() if key.startswith(_PREFIX)}
    kind, factor = given.pop("type", "none"), float(given.pop("factor", 1.0))
    parameters = {ours: given.pop(theirs) for theirs, ours in _PARAMETERS.items() if theirs in given}
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    unknown = sorted(key for key, value in given.items() if key not in _NEUTRAL or value != _NEUTRAL[key])
    if unknown or kind not in ("linear", "yarn"):
        what = f"{_PREFIX}{unknown[0]} {given[unknown[0]]}" if unknown else f"RoPE scaling of type {kind}"
        raise ModelError(f"{file} has {what}, which cannot be taken over: name the model that it was made from")
    return {"rope_type": kind, "factor": factor, **(parameters if kind == "yarn" else {})}


def _llama3_scaling(factors: Tensor, config: PretrainedConfig, file: Path) -> dict[str, Any]:
    """Return the parameters of Llama 3 that give these factors, by which the file divides the frequencies."""
    factor = float(factors.max())
    if factor == 1:
        return {}
    theta = config.rope_parameters["rope_theta"]
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    low, high, original = _LLAMA3.values()
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(expected, factors.double(), rtol=1e-3):
        raise ModelError(
            f"{file} has RoPE factors that are not those of Llama 3: name the model that it was made from"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _add_scaling(config: PretrainedConfig, scaling: dict[str, Any], file: Path) -> None:
    parameters = config.rope_parameters
    if "rope_theta" in parameters:
        config.rope_parameters = {**parameters, **scaling}
    elif "full_attention" in parameters:  # as in llama.cpp, layers with a window are not scaled
        config.rope_parameters = {**parameters, "full_attention": {**parameters["full_attention"], **scaling}}
    else:
        raise ModelError(f"{file} scales RoPE, which {config.model_type} does not: name the model it was made from")


def _check_tensors(config: PretrainedConfig, architecture: str, names: set[str], file: Path) -> None:
    """Raise ValueError if the model of this configuration does not use some of the file's tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    lost = sorted(names - set(get_gguf_hf_weights_map(model, processor)))
    if lost:
        raise ModelError(
            f"{file} has {len(lost)} tensors that transformers' {config.model_type} does not use, the first is "
            f"{lost[0]!r}: name the model that it was made from"
        )
