"""Access to the architecture of a transformers model: layers, sliding windows, output layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from parse_infer.errors import ModelError


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the language model itself, which multi-part models nest."""
    return model.config.get_text_config(decoder=True)


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """Return the input embeddings of all tokens, [V, H]."""
    return cast(Tensor, model.get_input_embeddings().weight)


def layer_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the sliding window of each layer kind in the model: {"full_attention": None, "sliding_attention": w}.

    Raises:
        ValueError: a kind of layer whose cache cannot be cropped to an earlier token exactly.
    """
    name, config = type(model).__name__, text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder: PARSE needs a decoder-only language model")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise ModelError(f"{name} attends in both directions: PARSE needs a causal language model")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} shares keys and values between layers, which is not supported: choose another model")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"{name} has {kind} layers, whose cache cannot be cropped to a cut exactly: choose a model with full "
                "or sliding-window attention"
            )
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} keeps a recurrent state, which cannot be cropped to a cut: choose another model")
    windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
    for module in model.modules():
        own = getattr(module, "sliding_window", None)
        if isinstance(own, int) and own not in windows.values():
            raise ModelError(f"{name} has a layer with window {own}, but its configuration lists {windows}")
    return windows


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers in order.

    Raises:
        ValueError: the backbone has no `ModuleList` of `num_hidden_layers` modules.
    """
    n = text_config(model).num_hidden_layers
    for module in getattr(model, model.base_model_prefix).modules():
        if isinstance(module, nn.ModuleList) and len(module) == n:
            return module
    raise ModelError(f"{type(model).__name__} has no ModuleList of {n} layers: choose another model")


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor between the output layer's result and the logits: Cohere multiplies, Granite divides."""
    config = text_config(model)
    return getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)


def output_layer(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the map from final-norm hidden states [..., H] to logits [..., V], with the model's scale and cap."""
    lm_head, scale = model.get_output_embeddings(), logit_scale(model)
    softcap = getattr(text_config(model), "final_logit_softcapping", None)  # of Gemma

    def logits(hidden: Tensor) -> Tensor:
        result = lm_head(hidden)
        if scale != 1:
            result = result * scale
        return result if softcap is None else torch.tanh(result / softcap) * softcap

    return logits
