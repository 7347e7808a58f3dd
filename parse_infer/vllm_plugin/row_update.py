"""The adapter's low-rank update on linear layers of a vLLM model, for selected rows of a step only.

With tensor parallelism, a layer and its update hold only a part of the inputs or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.distributed import tensor_model_parallel_all_reduce

from parse_infer.errors import ServerError
from parse_infer.judge.adapter_files import AdapterFiles
from parse_infer.models.lora import LowRankUpdate, low_rank_updates


class RowUpdate:
    """Patches layers to add their update to the rows `rows` of their input.

    Attributes:
        rows: int64 [n], rows of the current step; None: the layers run unchanged.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def patch(self, model: nn.Module, files: AdapterFiles, shape: PreTrainedModel, packed: Mapping[str, Any]) -> None:
        """Patch the layers that the adapter updates.

        Args:
            model: vLLM's model.
            shape: the same model in transformers, on the meta device.
            packed: layers of `shape` that one layer of `model` combines, by name ("qkv_proj": ["q_proj", …]).

        Raises:
            ValueError: as `low_rank_updates` does, or for a layer without support for updates.
        """
        updates = {update.path: update for update in low_rank_updates(files.peft_config, files.tensors, shape)}
        for path, layer in model.named_modules():
            parent, _, name = path.rpartition(".")
            parts = [f"{parent}.{part}" for part in packed.get(name, [name])]
            found = [updates.pop(part, None) for part in parts]
            if any(found):
                widths = [cast(nn.Linear, shape.get_submodule(part)).out_features for part in parts]
                layer.forward = self._with_update(layer.forward, *_part(layer, *_stacked(found, widths), widths))
        if updates:
            raise ServerError(f"the adapter changes {min(updates)}, a layer that the plugin cannot update")

    def _with_update(self, forward: Callable[..., Any], a: Tensor, b: Tensor, split: bool) -> Callable[..., Any]:
        """Wrap a layer's forward. `split`: `a` covers only this rank's part of the inputs."""

        def adapted(x: Tensor) -> Any:
            result = forward(x)
            if self.rows is not None:
                y = result[0] if isinstance(result, tuple) else result
                narrow = x[self.rows].to(a.dtype) @ a.T
                change = (tensor_model_parallel_all_reduce(narrow) if split else narrow) @ b.T
                y[self.rows] = (y[self.rows].to(a.dtype) + change).to(y.dtype)
            return result

        return adapted


def _place(layer: nn.Module) -> Tensor:
    """An empty tensor with device and dtype of a layer's update. A CPU is slow at small 16-bit products: float32."""
    weight: Any = layer.weight
    dtype = weight.dtype if weight.is_floating_point() and weight.element_size() > 1 else torch.get_default_dtype()
    return torch.empty(0, device=weight.device, dtype=torch.float32 if weight.device.type == "cpu" else dtype)


def _stacked(updates: Sequence[LowRankUpdate | None], widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One update for layers with concatenated outputs: A [Σr, in] concatenated, B [Σout, Σr] block-diagonal."""
    present = [update for update in updates if update is not None]
    blocks = [
        torch.zeros(width, 0) if update is None else update.b.float()
        for update, width in zip(updates, widths, strict=True)
    ]
    return torch.cat([update.a.float() for update in present]), torch.block_diag(*blocks)


def _part(layer: Any, a: Tensor, b: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor, bool]:
    """This rank's part of an update for layers of these widths, and whether the inputs are split among ranks."""
    rank, ranks = layer.tp_rank, layer.tp_size
    n_inputs = getattr(layer, "input_size_per_partition", a.shape[1])
    split = n_inputs < a.shape[1]
    if split:
        a = a[:, rank * n_inputs : (rank + 1) * n_inputs]
    rows = []
    for own, size, whole in zip(b.split(list(widths)), layer.output_partition_sizes, widths, strict=True):
        alike = size * ranks // whole  # ranks that share the same part, such as replicated KV heads
        rows.append(own[rank // alike * size :][:size])
    place = _place(layer)
    return a.to(place).contiguous(), torch.cat(rows).to(place), split
