"""Linear layers whose weights lie in memory as oneDNN wants them: the layout in which a CPU reads them fastest.

A decode step is bound by reading every weight once. In the ordinary layout PyTorch's matrix library reaches about half
of the memory's speed on such products with one row; in oneDNN's own layout nearly all of it (docs/benchmarks.md).
`torch.compile` does the same to frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SMALL = (
    16 * 2**20
)  # bytes of linear weights; a model below it stays in the caches, where the ordinary product is faster
_DTYPES = (torch.float32, torch.bfloat16)


class PrepackedLinear(nn.Linear):
    """Computes what `linear` computes, without gradients. Its dense `weight` is made anew whenever it is asked for."""

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
        return copy  # of the same weights, which nothing changes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrepackedLinear:
        moved = fn(torch.empty(0, dtype=self.packed.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.packed.dtype:
            raise ValueError("this model was prepared for the CPU: load it again with the device and dtype you want")
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def pack_linears(model: PreTrainedModel) -> int:
    """Replace the linear layers of a large model on a CPU by packed ones, in place. It cannot be trained afterwards.

    Returns:
        How many were replaced: none where oneDNN is not there, or gives another product than PyTorch.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m.weight.dtype in _DTYPES}
    size = sum(m.weight.nbytes for m in found.values())
    if model.device.type != "cpu" or size < SMALL or not all(m.weight.device.type == "cpu" for m in found.values()):
        return 0
    of_each_shape = {m.weight.shape: m for m in found.values()}
    if not all(_trustworthy(m) for m in of_each_shape.values()):
        return 0
    names = list(found)
    del of_each_shape
    for name in names:  # one at a time, so that at most one matrix exists twice
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PrepackedLinear(found.pop(name)))
    return len(names)


def n_parameters(model: PreTrainedModel) -> int:
    """Weights of the model, packed ones included; an output layer tied to the embedding counts once."""
    packed = [m for m in model.modules() if isinstance(m, PrepackedLinear)]
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        packed = [m for m in packed if m is not model.get_output_embeddings()]
    return sum(p.numel() for p in model.parameters()) + sum(m.in_features * m.out_features for m in packed)


def _trustworthy(linear: nn.Linear) -> bool:
    """Whether the packed product exists in this build of PyTorch and equals the ordinary one."""
    x = torch.linspace(-1, 1, 3 * linear.in_features, dtype=linear.weight.dtype).view(1, 3, -1)
    with torch.inference_mode():
        expected = linear(x)
        try:
            packed = PrepackedLinear(linear)
            got = torch.cat([packed(x[:, :1]), packed(x)[:, 1:]], dim=1)
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
    exact = expected.dtype == torch.float32
    scale = float(cast(Tensor, expected.abs().max()))
    return torch.allclose(got, expected, rtol=0, atol=scale * (1e-5 if exact else 2e-2))
