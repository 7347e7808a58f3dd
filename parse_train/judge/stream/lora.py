"""peft's LoRA for the second stream: attach it, and refuse layers that do not see the order of the tokens."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.errors import ParseError

ADAPTER = "default"


@dataclass(frozen=True)
class LoraOptions:
    """Size, scale and dropout of the LoRA, and the names of the adapted layers, as in peft's `LoraConfig`."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: Sequence[str] = ("all-linear",)


def attach_lora(target: PreTrainedModel, lora: LoraOptions) -> PeftModel:
    """Wrap `target` with a new LoRA, whose initial update is zero, and freeze all other parameters.

    Raises:
        ValueError: no layer matches `target_modules` (peft's message), or an adapted layer gets flattened tokens.
    """
    names, (ordered, flattened) = list(lora.target_modules), token_layouts(target)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute of transformers by its old name
        try:
            model = get_peft_model(target, config)
        except ValueError as error:
            if not flattened:
                raise
            # peft has no LoRA for some routers and fused experts; its error does not name them.
            raise ParseError(_refusal(f"peft does not support {', '.join(names)} here", ordered, flattened)) from error
    adapted = {name for name, layer in model.get_base_model().named_modules() if isinstance(layer, LoraLayer)}
    if wrong := [name for name in flattened if name in adapted]:
        raise ParseError(_refusal("inference could not limit the LoRA to the second stream", ordered, wrong))
    return model


@torch.no_grad()
def token_layouts(target: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of weighted modules with inputs [batch, tokens, features], and with flattened inputs.

    Flattened inputs are [batch · tokens, features], as in a mixture of experts. Runs one forward of six tokens."""
    ordered: list[str] = []
    flattened: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                (ordered if args[0].ndim > 2 else flattened).append(name)

        return hook

    weighted = [(n, m) for n, m in target.named_modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in weighted]
    try:
        ids = torch.zeros(2, 3, dtype=torch.long, device=target.device)
        # With a cache, whatever the configuration says: without one, transformers reads the contents of positions.
        getattr(target, target.base_model_prefix)(ids, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return ordered, flattened


def _refusal(reason: str, ordered: Sequence[str], flattened: Sequence[str]) -> str:
    """Return the error for a mixture of experts, with the modules and the layers to adapt instead."""
    modules = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in flattened)
    attention = dict.fromkeys(name.rpartition(".")[2] for name in ordered if "attn" in name or "attention" in name)
    return (
        f"{', '.join(modules)} get flattened tokens, as in a mixture of experts, and {reason}: adapt the attention "
        f"layers only, lora_target_modules: [{', '.join(attention)}]"
    )
