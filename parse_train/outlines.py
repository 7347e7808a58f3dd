"""Models without weights, from their configurations: bytes, depth, and the time to write answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from parse_infer.models.loading import load_config

PROMPT_TOKENS = 256  # assumed length of a prompt that a model answers
BANDWIDTH = 1.3e12  # assumed bytes per second: 40 % of an H100's memory bandwidth


def outline(name: str, dtype: str, layers: int | None = None) -> PreTrainedModel:
    """Build a model without weights (device "meta") from its configuration, with all or the first `layers`."""
    config = load_config(name)
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    kept = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=kept)
    return model.requires_grad_(False)


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors, tied ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def cache_per_token(name: str, dtype: str) -> int:
    """Bytes of a token's keys and values."""
    text = load_config(name).get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kept: Any = (load_config(name).dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    return 2 * int(text.num_hidden_layers * heads * head * kept.itemsize)


def depth_of(name: str) -> int:
    return int(load_config(name).get_text_config(decoder=True).num_hidden_layers)


def writing_seconds(name: str, dtype: str, answers: int, batch: int, tokens: int) -> float:
    """Return the seconds in which a model writes `answers` of `tokens` each, `batch` at a time.

    Each step reads all weights, and the keys and values of half-written answers."""
    weights = size([*outline(name, dtype).parameters()])
    cache = min(batch, answers) * (PROMPT_TOKENS + tokens / 2) * cache_per_token(name, dtype)
    return math.ceil(answers / batch) * tokens * (weights + cache) / BANDWIDTH
