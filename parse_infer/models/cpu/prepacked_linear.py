"""Linear layers with weights in oneDNN's own memory layout, the fastest layout on a CPU.

A decode step is bound by memory bandwidth. With one input row, PyTorch's matrix library reaches about half of the
bandwidth in the ordinary layout, and nearly all of it in oneDNN's layout (docs/reference/cpu.md). `torch.compile` also
prepacks frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.errors import ModelError
from parse_infer.models.cpu.int8_linear import Int8Linear

SMALL = 16 * 2**20  # bytes of linear weights; smaller models fit in CPU caches, where the ordinary layout is faster
_DTYPES = (torch.float32, torch.bfloat16)


class PrepackedLinear(nn.Linear):
    """Computes the results of `linear`, without gradients. Each access to `weight` creates a dense copy."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> PrepackedLinear:
        copy = PrepackedLinear.__new__(PrepackedLinear)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        copy._parameters = dict(self._parameters)
        return copy  # shares the weights, which never change

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrepackedLinear:
        moved = fn(torch.empty(0, dtype=self.packed.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.packed.dtype:
            raise ModelError("this model was prepacked for the CPU: load it again with the device and dtype you want")
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor, not a quantised one of torchao and the like."""
    return type(weight) in (Tensor, nn.Parameter)


def pack_linears(model: PreTrainedModel) -> int:
    """Replace the linear layers of a large CPU model by prepacked layers, in place. The model is no longer trainable.

    Returns:
        The number of replaced layers; 0 if oneDNN is unavailable or differs from PyTorch.
    """
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    packable = {name: m for name, m in linears.items() if m.weight.dtype in _DTYPES and is_plain(m.weight)}
    size = sum(m.weight.nbytes for m in packable.values())
    if model.device.type != "cpu" or size < SMALL or not all(m.weight.device.type == "cpu" for m in packable.values()):
        return 0
    of_each_shape = {m.weight.shape: m for m in packable.values()}
    if not all(_trustworthy(m) for m in of_each_shape.values()):
        return 0
    names = list(packable)
    del of_each_shape
    for name in names:  # one at a time, so that at most one matrix exists twice
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PrepackedLinear(packable.pop(name)))
    return len(names)


def n_parameters(model: PreTrainedModel) -> int:
    """Count the model's weights, prepacked and 8-bit layers included; an output layer tied to the embedding counts
    once."""
    prepacked = [m for m in model.modules() if isinstance(m, PrepackedLinear | Int8Linear)]
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        prepacked = [m for m in prepacked if m is not model.get_output_embeddings()]
    return sum(p.numel() for p in model.parameters()) + sum(m.in_features * m.out_features for m in prepacked)


def _trustworthy(linear: nn.Linear) -> bool:
    """Whether this build of PyTorch has the prepacked product, and its result equals the ordinary product."""
    x = torch.linspace(-1, 1, 3 * linear.in_features, dtype=linear.weight.dtype).view(1, 3, -1)
    with torch.inference_mode():
        expected = linear(x)
        try:
            prepacked = PrepackedLinear(linear)
            got = torch.cat([prepacked(x[:, :1]), prepacked(x)[:, 1:]], dim=1)
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
    exact = expected.dtype == torch.float32
    scale = float(cast(Tensor, expected.abs().max()))
    return torch.allclose(got, expected, rtol=0, atol=scale * (1e-5 if exact else 2e-2))
