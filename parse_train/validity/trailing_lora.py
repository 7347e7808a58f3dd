"""peft's activated LoRA, applied to the last n tokens of every row by slicing.

peft finds its tokens with a boolean mask (a device synchronisation per layer) and registers hooks on every layer at
every call. In the packed layout the probes always come last, so a slice says the same. Parameters, names and file
format stay peft's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        ValueError: no layer with one of the names in `target_modules` (peft's own sentence).
    """
    names = list(target_modules)
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
        model = get_peft_model(target, config)
    switch = TrailingLora()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_variant[ADAPTER] = switch
            layer.cast_input_dtype_enabled = False  # only the slice is cast, above
    return model, switch
