"""Initial weights of a language model: random weights, layers of another model, or a LoRA on another model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import ParseError
from parse_infer.models.loading import load_tokenizer, load_weights
from parse_infer.models.lora import describe_base, is_lora, read_lora
from parse_zoo.train.language_model_config import LanguageModelConfig


def all_weights(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a model of the recipe's architecture, with random weights or weights of `initial_model`."""
    fields = dict(config.model_config)
    architecture = AutoConfig.for_model(
        fields.pop("model_type"),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    model = AutoModelForCausalLM.from_config(architecture)
    if config.initial_model is not None:
        start_from(model, config.initial_model, config.initial_layers, tokenizer)
    return model


def with_lora(config: LanguageModelConfig) -> tuple[PeftModel, dict[str, Any]]:
    """Return the frozen `initial_model` with a LoRA on all linear layers, and the description of its weights."""
    if config.initial_lora is not None and not is_lora(Path(config.initial_lora)):
        raise FileNotFoundError(f"initial_lora {config.initial_lora} is not a LoRA folder (with adapter_config.json)")
    numbers = torch.bfloat16 if config.bf16 else torch.float32  # frozen weights need no copy in float32
    model = load_weights(str(config.initial_model), numbers)
    base = describe_base(model, str(config.initial_model))
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = cast(PeftModel, get_peft_model(model, lora))
    if config.initial_lora is not None:
        _load_lora(config.initial_lora, adapted, lora, base)
    return adapted, base


def _load_lora(folder: str, adapted: PeftModel, requested: LoraConfig, base: Mapping[str, Any]) -> None:
    """Load the LoRA in `folder` into `adapted`; raise ValueError for other sizes or another base model."""
    lora = read_lora(Path(folder))
    for key, value in (("r", requested.r), ("lora_alpha", requested.lora_alpha), ("use_rslora", False)):
        if lora.config.get(key, value) != value:
            raise ParseError(f"initial_lora {folder} has {key} {lora.config[key]}, but the recipe has {value}")
    lora.check_base(str(base["fingerprint"]), str(base["name"]))
    weights, own = lora.tensors(), get_peft_model_state_dict(adapted)
    if weights.keys() != own.keys():
        odd = sorted(weights.keys() ^ own.keys())[0]
        raise ParseError(f"initial_lora {folder} adapts other layers than this recipe, first {odd}")
    set_peft_model_state_dict(adapted, weights)


def start_from(
    model: PreTrainedModel, name: str, layers: list[int] | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Copy embedding, norm, head and the chosen `layers` of the model called `name` into `model` (in place).

    If `tokenizer` differs from that model's tokenizer, tokens with the same text keep their embeddings, and all other
    embeddings are random.

    A shallow draft model initialised from layers of its target learns several times faster than from scratch. A layer
    repeated in `layers` is a copy with zero output matrices, so that the deeper model initially computes the same
    function (LLaMA Pro, arXiv 2401.02415).

    Raises:
        ValueError: `name` does not have such a layer, or has weights of another shape.
    """
    source = load_weights(name, torch.float32)
    chosen = list(range(len(source.model.layers))) if layers is None else layers
    if len(chosen) != len(model.model.layers) or not all(0 <= i < len(source.model.layers) for i in chosen):
        raise ParseError(
            f"initial_layers {chosen} do not fill {len(model.model.layers)} layers from the "
            f"{len(source.model.layers)} layers of {name}; name one source layer per layer"
        )
    source.model.layers = torch.nn.ModuleList(deepcopy(source.model.layers[i]) for i in chosen)
    for position, i in enumerate(chosen):
        if i in chosen[:position]:
            layer = source.model.layers[position]
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    if tokenizer is not None:
        _retokenize(source, load_tokenizer(name).get_vocab(), tokenizer.get_vocab())
    try:
        model.load_state_dict(source.state_dict())
    except RuntimeError as error:
        raise ParseError(
            f"the weights of {name} do not fit model_config: {str(error).splitlines()[-1].strip()}"
        ) from error


def _retokenize(model: Any, before: dict[str, int], after: dict[str, int]) -> None:
    """Replace the vocabulary `before` of `model` by `after` (text to id), in place."""
    if before == after:
        return
    shared = [text for text in after if text in before]
    to, of = torch.tensor([after[text] for text in shared]), torch.tensor([before[text] for text in shared])
    old = {
        layer: layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    model.resize_token_embeddings(max(after.values()) + 1, mean_resizing=False)
    for layer, weight in zip((model.get_input_embeddings(), model.get_output_embeddings()), old.values(), strict=True):
        with torch.no_grad():
            layer.weight.normal_(std=float(weight.std()))
            layer.weight[to] = weight[of]
