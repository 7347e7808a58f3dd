"""The adapter's LoRA, applied to the tokens of the second stream only, the last ones of a forward.

peft applies a LoRA to every token, and its wrapped linears slow plain decoding. Here the update is a slice:
`y[..., -n:, :] += x[..., -n:, :] @ A.T @ B.T * scaling`. Outside `applied` the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.errors import ModelError
from parse_infer.models.lora import check_lora_options, low_rank_updates


class StreamLoRA:
    """Low-rank updates of linear layers; `applied(n)` enables them for the last n positions.

    Args:
        updates: for each adapted layer, (layer, A [r, in], B [out, r]) with the scaling included in B.
    """

    def __init__(self, updates: list[tuple[nn.Linear, Tensor, Tensor]]) -> None:
        self._updates = updates

    @classmethod
    def from_peft(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: PreTrainedModel) -> StreamLoRA:
        """Build from the content of `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            ValueError: an unsupported peft option, a layer missing in the model or in the file, or a tensor whose
                shape does not match the layer.
        """
        check_lora_options(config, also=("fan_in_fan_out",))
        updates = []
        for update in low_rank_updates(config, tensors, model):
            layer = update.layer
            if not isinstance(layer, nn.Linear):
                raise ModelError(f"the adapter changes {update.path}, which is no Linear layer")
            if layer is model.get_output_embeddings():
                raise ModelError(f"the adapter changes the output layer {update.path}, which no stream reaches")
            device = layer.weight.device
            # On a CPU, small bfloat16 products are slower than float32.
            dtype = torch.float32 if device.type == "cpu" else _compute_dtype(layer.weight.dtype, model.dtype)
            updates.append((layer, update.a.to(device, dtype), update.b.to(device, dtype)))
        return cls(updates)

    @contextmanager
    def applied(self, n: int) -> Iterator[None]:
        """Add the update to the last `n` positions of every forward within the `with` block.

        Args:
            n: number of trailing positions, at least 1.
        """
        if n < 1:
            raise ModelError(f"the adapter applies to at least one position, not {n}")
        before = [module.__dict__.get("forward") for module, _, _ in self._updates]
        try:
            for module, a, b in self._updates:
                module.__dict__["forward"] = _with_update(module.forward, a, b, n)
            yield
        finally:
            for (module, _, _), forward in zip(self._updates, before, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:  # set by another library, such as accelerate's offloading
                    module.__dict__["forward"] = forward


def _compute_dtype(*candidates: torch.dtype) -> torch.dtype:
    """Return the first floating-point dtype of at least 16 bits, else bfloat16. Quantised layers take the model's."""
    wide = (dtype for dtype in candidates if dtype.is_floating_point and dtype.itemsize >= 2)
    return next(wide, torch.bfloat16)


def _with_update(forward: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, n: int) -> Callable[[Tensor], Tensor]:
    def adapted(x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ModelError(
                "an adapted layer receives tokens without their order (as in mixture-of-experts layers), so those "
                "of the second stream cannot be identified: adapt the attention layers only"
            )
        y = forward(x)
        if len(x) == 1:  # two matrix products take half the time of the general form below
            rows = y[0, -n:]
            rows.copy_(torch.addmm(rows.to(a.dtype), x[0, -n:].to(a.dtype) @ a.T, b.T))
        else:
            y[..., -n:, :] += nn.functional.linear(nn.functional.linear(x[..., -n:, :].to(a.dtype), a), b).to(y.dtype)
        return y

    return adapted
