"""peft's activated LoRA, applied to the last n tokens of every row by slicing.

peft finds its tokens with a boolean mask (a device synchronisation per layer) and registers hooks on every layer at
every call. In the packed layout the probes always come last, so a slice says the same. Parameters, names and file
format stay peft's.
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

ADAPTER = "default"


class TrailingLora(ALoraLinearVariant):
    """Stands in for peft's activated-LoRA variant in every adapted layer; `active` is n, shared by all of them."""

    def __init__(self) -> None:
        self.active = 0

    def forward(  # type: ignore[override]  # peft declares it static; it is called on the object
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        """`result` [..., T, out] with the update of `x` [..., T, in] added to its last n tokens."""
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
        """Apply the update to the last `n` tokens inside the `with`, to none outside."""
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
    """Wrap `target` with a fresh activated LoRA (its update is zero at first) and freeze everything else.

    Raises:
        ValueError: no layer with one of the names in `target_modules` (peft's own sentence), or layers that see
            flattened tokens.
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
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for an attribute by its older name
        try:
            model = get_peft_model(target, config)
        except ValueError as error:
            if not flattened:
                raise
            # peft has no activated LoRA for routers and fused experts, and says so without naming them.
            raise ValueError(_refusal(f"peft refuses {', '.join(names)} here", ordered, flattened)) from error
    switch, adapted = TrailingLora(), set()
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            adapted.add(name)
            layer.lora_variant[ADAPTER] = switch
            layer.cast_input_dtype_enabled = False  # only the slice is cast, above
    if wrong := [name for name in flattened if name in adapted]:
        raise ValueError(_refusal("the update would reach other tokens than the probe's", ordered, wrong))
    return model, switch


@torch.no_grad()
def token_layouts(target: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names of the modules with weights that see hidden states as [batch, tokens, features], and of those that see
    them flattened to [batch · tokens, features], as in a mixture of experts. One forward of six tokens tells."""
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
    """The sentence about a mixture of experts: which modules, and what to adapt instead."""
    modules = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in flattened)
    attention = dict.fromkeys(name.rpartition(".")[2] for name in ordered if "attn" in name or "attention" in name)
    return (
        f"{', '.join(modules)} see tokens flattened, as in a mixture of experts, and {reason}: adapt the attention "
        f"layers only, lora_target_modules: [{', '.join(attention)}]"
    )
