"""The adapter's low-rank update, added to the trailing probe tokens of one forward and to nothing else.

Reads peft's activated-LoRA files (`alora_invocation_tokens`). peft's own forward finds its tokens with a boolean mask,
a device synchronisation in every layer, and leaves wrapped linears behind that tax plain decoding. Here the update is
a slice: `y[..., -n:, :] += x[..., -n:, :] @ A.T @ B.T * scaling`, and outside `applied` the model is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.models.low_rank import check_options, low_rank_updates


class ProbeLoRA:
    """Low-rank updates of some of a model's linear layers, switched on for the last n positions by `applied(n)`.

    Args:
        updates: for each adapted layer, (layer, A [r, in], B [out, r]) with the scaling already inside B.
    """

    def __init__(self, updates: list[tuple[nn.Linear, Tensor, Tensor]]) -> None:
        self._updates = updates

    @classmethod
    def from_peft(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: PreTrainedModel) -> ProbeLoRA:
        """Build from the content of `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            ValueError: not an activated LoRA, an unsupported peft option, a layer that the model does not have or the
                file does not hold, or a tensor whose shape does not fit the layer.
        """
        if config.get("peft_type") == "LORA" and not config.get("alora_invocation_tokens"):
            raise ValueError(
                "adapter_config.json has no alora_invocation_tokens: an ordinary LoRA, active on the whole text, "
                "cannot be applied to the probes alone"
            )
        check_options(config, also=("fan_in_fan_out",))
        updates = []
        for update in low_rank_updates(config, tensors, model):
            layer = update.layer
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"the adapter changes {update.path}, which is no Linear layer")
            if layer is model.get_output_embeddings():
                raise ValueError(f"the adapter changes the output layer {update.path}, which a probe never reaches")
            device = layer.weight.device
            # On a CPU small products in bfloat16 are slower.
            dtype = torch.float32 if device.type == "cpu" else _compute_dtype(layer.weight.dtype, model.dtype)
            updates.append((layer, update.a.to(device, dtype), update.b.to(device, dtype)))
        return cls(updates)

    @contextmanager
    def applied(self, n: int) -> Iterator[None]:
        """Within the `with`, add the update to the last `n` positions of every forward. Always undone at the end.

        Args:
            n: number of trailing positions, at least 1.
        """
        if n < 1:
            raise ValueError(f"the adapter applies to at least one position, not {n}")
        before = [module.__dict__.get("forward") for module, _, _ in self._updates]
        try:
            for module, a, b in self._updates:
                module.__dict__["forward"] = _with_update(module.forward, a, b, n)
            yield
        finally:
            for (module, _, _), forward in zip(self._updates, before, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:  # somebody else's, such as accelerate's offloading
                    module.__dict__["forward"] = forward


def _compute_dtype(*candidates: torch.dtype) -> torch.dtype:
    """The first floating-point type of at least 16 bits, else bfloat16. A quantised layer computes in its model's."""
    wide = (dtype for dtype in candidates if dtype.is_floating_point and dtype.itemsize >= 2)
    return next(wide, torch.bfloat16)


def _with_update(forward: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, n: int) -> Callable[[Tensor], Tensor]:
    def adapted(x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(
                "an adapted layer sees tokens without their order (mixture-of-experts layers do), so the probe tokens "
                "cannot be told apart: adapt the attention layers only"
            )
        y = forward(x)
        if len(x) == 1:  # two products of matrices: half the time of the general form below
            rows = y[0, -n:]
            rows.copy_(torch.addmm(rows.to(a.dtype), x[0, -n:].to(a.dtype) @ a.T, b.T))
        else:
            y[..., -n:, :] += nn.functional.linear(nn.functional.linear(x[..., -n:, :].to(a.dtype), a), b).to(y.dtype)
        return y

    return adapted
