"""peft's activated LoRA, applied to the last n tokens of every row by slicing.

peft selects tokens with a boolean mask (a device synchronisation per layer) and registers hooks on every layer at
every call. In the packed layout the probes always come last, so a slice is equivalent. Parameters, names and file
format are peft's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import ALoraLinearVariant
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.errors import ParseError

ADAPTER = "default"


class TrailingLora(ALoraLinearVariant):
    """Replaces peft's activated-LoRA variant in all adapted layers, which share `active` = n."""

    def __init__(self) -> None:
        self.active = 0

    def forward(  # type: ignore[override]  # static in peft, but called on the object
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        """Add the update of `x` [..., T, in] to the last n tokens of `result` [..., T, out]."""
        if self.active == 0:
            return result
        lora_a: nn.Linear = module.lora_A[active_adapter]
        tail = module.lora_dropout[active_adapter](x[..., -self.active :, :].to(lora_a.weight.dtype))
        update = module.lora_B[active_adapter](lora_a(tail)) * module.scaling[active_adapter]
        if update.shape[-2] == result.shape[-2]:
            return result + update.to(result.dtype)
        return result.slice_scatter(
            result[..., -self.active :, :] + update.to(result.dtype), dim=-2, start=result.shape[-2] - self.active
        )

    @contextmanager
    def on(self, n: int) -> Iterator[None]:
        """Apply the update to the last `n` tokens inside the `with` block."""
        self.active, before = n, self.active
        try:
            yield
        finally:
            self.active = before


def attach_trailing_lora(
    target: PreTrainedModel,
    probe_ids: Sequence[int],
    *,
    rank: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str],
) -> tuple[PeftModel, TrailingLora]:
    """Wrap `target` with a new activated LoRA, whose initial update is zero, and freeze all other parameters.

    Raises:
        ValueError: no layer matches `target_modules` (peft's message), or an adapted layer gets flattened tokens.
    """
    names, (ordered, flattened) = list(target_modules), token_layouts(target)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        alora_invocation_tokens=list(probe_ids),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute of transformers by its old name
        try:
            model = get_peft_model(target, config)
        except ValueError as error:
            if not flattened:
                raise
            # peft has no activated LoRA for routers and fused experts; its error does not name them.
            raise ParseError(_refusal(f"peft does not support {', '.join(names)} here", ordered, flattened)) from error
    switch, adapted = TrailingLora(), set()
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            adapted.add(name)
            layer.lora_variant[ADAPTER] = switch
            layer.cast_input_dtype_enabled = False  # `TrailingLora.forward` casts only the slice
    if wrong := [name for name in flattened if name in adapted]:
        raise ParseError(_refusal("the LoRA would change other tokens than the probe's", ordered, wrong))
    return model, switch


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
        getattr(target, target.base_model_prefix)(torch.zeros(2, 3, dtype=torch.long, device=target.device))
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
