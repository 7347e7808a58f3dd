"""A step of one token for a small model on a CPU: a third of the time of a small model's step goes to calls, not to
matrices, so products of the same input become one, and the weights of norms move into them.

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

from parse_infer.models.cpu.prepacked_linear import PrepackedLinear

LARGEST = 64 * 2**20  # bytes of linear weights; beyond it the matrices take most of the time

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """Products of one layer.

    Attributes:
        attention: of the input: query, key, value.
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
        self._layers = [_fused(layer) for layer in layers]

    @classmethod
    @torch.inference_mode()
    def of(cls, layers: Sequence[Any], norm: Any, config: Any, head_size: int) -> FusedStep | None:
        """From the parts of the layers (`fast_backbone`) and the last norm; None where this is not for the model."""
        linears = [linear for layer in layers for linear in layer.linears]
        if not all(type(m) in (nn.Linear, PrepackedLinear) and not is_hooked(m) for m in linears):
            return None
        norms = [norm, *(each for layer in layers for each in (layer.before, layer.between))]
        if any(each.weight.dtype != torch.float32 or each.weight.device.type != "cpu" for each in norms):
            return None
        if any(x.query_norm is not None or x.gate.bias is not None or x.up.bias is not None for x in layers):
            return None
        large = sum(m.in_features * m.out_features for m in linears) * 4 > LARGEST
        if large or len({each.variance_epsilon for each in norms}) > 1:
            return None
        return cls(layers, norm, config, head_size)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, heard: dict[int, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """From the embeddings of the next tokens of B texts to their final-norm states, both [B, 1, H].

        The cache grows by them.

        Args:
            cos, sin: of their positions, [head size] or [B, 1, 1, head size]; for `rotate`.
            heard: gets what enters the layers that are its keys.
            mask: added to the scores of the keys, [B, 1, 1, keys]; None: each token sees all.
        """
        x, size = x[:, 0], self._head_size
        queries = self._kv_heads * self._groups
        rotated = queries + self._kv_heads  # heads
        for i, layer in enumerate(self._layers):
            if i in heard:
                heard[i] = x[:, None]
            parts = layer.attention(self._normed(x)).view(len(x), -1, 1, size)
            turned = rotate(parts[:, :rotated], cos, sin)
            keys, values = cache.update(turned[:, queries:], parts[:, rotated:], i)
            query = turned[:, :queries].view(len(x), self._kv_heads, self._groups, size)
            out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scaling)
            x = x + layer.output(out.reshape(len(x), -1))
            gate, up = layer.gate_up(self._normed(x)).chunk(2, dim=-1)
            x = x + layer.down(layer.activation(gate).mul_(up))
        return (self._normed(x) * self._norm.weight)[:, None]

    def _normed(self, x: Tensor) -> Tensor:
        """x [B, H] over the root mean square of each row; two steps for one row, where `rms_norm` takes ten."""
        if len(x) == 1:
            row = x[0]
            return x * (torch.dot(row, row).item() / len(row) + self._epsilon) ** -0.5
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(self._epsilon).rsqrt_()


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody listens to it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` of transformers, for [1, heads, T, head size]; the sine of the first half is
    negative."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _fused(layer: Any) -> _Layer:
    readers = (layer.query, layer.key, layer.value)
    packed = isinstance(layer.query, PrepackedLinear)
    attention = torch.cat([reader.weight for reader in readers]) * layer.before.weight
    bias = torch.cat([reader.bias for reader in readers]) if layer.query.bias is not None else None
    gate_up = torch.cat([layer.gate.weight, layer.up.weight]) * layer.between.weight
    return _Layer(
        _product(attention, bias, packed),
        _product(layer.output.weight, layer.output.bias, packed),
        _product(gate_up, None, packed),
        _product(layer.down.weight, layer.down.bias, packed),
        layer.activation,
        layer.attention.scaling,
    )


def _product(weight: Tensor, bias: Tensor | None, packed: bool) -> Product:
    if not packed:
        weight = weight.detach()
        return lambda x: linear(x, weight, bias)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return PrepackedLinear(module).forward
