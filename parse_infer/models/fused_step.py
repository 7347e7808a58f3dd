"""A step of one token for a small model on a CPU: a third of the time of a small model's step goes to calls, not to
matrices, so products of the same input become one, and norms and rotations move into the weights.

The weights exist twice then, which is why this is for small models only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.cache_utils import Cache

from parse_infer.models.packed_linear import PackedLinear

LARGEST = 64 * 2**20  # bytes of linear weights; beyond it the matrices take most of the time

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """Products of one layer.

    Attributes:
        attention: of the input: query, key, both with their halves exchanged for the rotation, value.
        output, down: into the residual stream.
        gate_up: of the state between attention and MLP.
    """

    attention: Product
    output: Product
    gate_up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]
    scaling: float


class FusedStep:
    """Made by `of`."""

    def __init__(self, layers: Sequence[Any], norm: Any, config: Any, head_size: int) -> None:
        self._norm = norm
        self._kv_heads: int = config.num_key_value_heads
        self._groups: int = config.num_attention_heads // config.num_key_value_heads
        self._head_size = head_size
        self._epsilon: float = layers[0].before.variance_epsilon
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self._layers = [_fused(layer, heads, head_size) for layer in layers]

    @classmethod
    @torch.inference_mode()
    def of(cls, layers: Sequence[Any], norm: Any, config: Any, head_size: int) -> FusedStep | None:
        """From the parts of the layers (`fast_backbone`) and the last norm; None where this is not for the model."""
        linears = [linear for layer in layers for linear in layer.linears]
        if not all(type(m) in (nn.Linear, PackedLinear) and not is_hooked(m) for m in linears):
            return None
        if any(x.query_norm is not None for x in layers):
            return None
        if any(x.gate.bias is not None or x.up.bias is not None for x in layers):
            return None
        if sum(m.in_features * m.out_features for m in linears) * 4 > LARGEST:
            return None
        norms = [norm, *(each for x in layers for each in (x.before, x.between))]
        one = {each.weight.dtype for each in norms} == {torch.float32} and {
            each.weight.device.type for each in norms
        } == {"cpu"}
        if not one or len({each.variance_epsilon for each in norms}) > 1 or linears[0].weight.dtype != torch.float32:
            return None
        return cls(layers, norm, config, head_size)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, heard: dict[int, Tensor]) -> Tensor:
        """From a token's embedding to its final-norm state, both [1, 1, H]; the cache grows by it.

        Args:
            cos, sin: [head size], of its position; the sine with the sign that the exchanged halves want.
            heard: gets what enters the layers that are its keys.
        """
        x, size = x[0], self._head_size
        queries = self._kv_heads * self._groups
        rotated = queries + self._kv_heads
        for i, layer in enumerate(self._layers):
            if i in heard:
                heard[i] = x[None]
            parts = layer.attention(self._normed(x)).view(1, -1, 1, size)
            turned = torch.addcmul(parts[:, :rotated] * cos, parts[:, rotated : 2 * rotated], sin)
            keys, values = cache.update(turned[:, queries:], parts[:, 2 * rotated :], i)
            query = turned[:, :queries].view(1, self._kv_heads, self._groups, size)
            out = scaled_dot_product_attention(query, keys, values, scale=layer.scaling)
            x = x + layer.output(out.reshape(1, -1))
            gate, up = layer.gate_up(self._normed(x)).chunk(2, dim=-1)
            x = x + layer.down(layer.activation(gate).mul_(up))
        return self._normed(x)[None] * self._norm.weight

    def _normed(self, x: Tensor) -> Tensor:
        """x [1, H] over its root mean square; one dot product and one product, where `rms_norm` takes ten steps."""
        row = x[0]
        return x * (torch.dot(row, row).item() / len(row) + self._epsilon) ** -0.5


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody listens to it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _fused(layer: Any, heads: tuple[int, int], size: int) -> _Layer:
    q, k = ((m.weight, m.bias) for m in (layer.query, layer.key))
    parts = [q, k, _halves_exchanged(*q, heads[0], size), _halves_exchanged(*k, heads[1], size)]
    parts.append((layer.value.weight, layer.value.bias))
    packed = isinstance(layer.query, PackedLinear)
    attention = torch.cat([weight for weight, _ in parts]) * layer.before.weight
    bias = torch.cat([bias for _, bias in parts]) if q[1] is not None else None
    gate_up = torch.cat([layer.gate.weight, layer.up.weight]) * layer.between.weight
    return _Layer(
        _product(attention, bias, packed),
        _product(layer.output.weight, layer.output.bias, packed),
        _product(gate_up, None, packed),
        _product(layer.down.weight, layer.down.bias, packed),
        layer.activation,
        layer.attention.scaling,
    )


def _halves_exchanged(weight: Tensor, bias: Tensor | None, heads: int, size: int) -> tuple[Tensor, Tensor | None]:
    """Of a product, with the two halves of each head exchanged."""

    def exchanged(rows: Tensor) -> Tensor:
        first, second = rows.view(heads, size, -1).split(size // 2, dim=1)
        return torch.cat([second, first], dim=1).reshape(rows.shape)

    return exchanged(weight), None if bias is None else exchanged(bias)


def _product(weight: Tensor, bias: Tensor | None, packed: bool) -> Product:
    if not packed:
        weight = weight.detach()
        return lambda x: linear(x, weight, bias)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear(module).forward
