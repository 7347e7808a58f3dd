"""Fused one-token step for small models on a CPU, and for models with 8-bit layers.

Function calls take a third of a small model's step. The fused step merges products of the same input into one and
folds norm weights into them. It copies the weights, so it is for small models only; 8-bit layers stay as they are and
share rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from parse_infer.models.cpu.int8_linear import Int8Linear, JoinedInt8
from parse_infer.models.cpu.prepacked_linear import PrepackedLinear, is_plain

LARGEST = 64 * 2**20  # bytes of linear weights; in larger models the matrix products dominate

Product = Callable[[Tensor], Tensor]


class Norm(Protocol):
    """A root-mean-square norm of transformers."""

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True)
class _Layer:
    """Products of one layer.

    Attributes:
        attention: input to query, key and value.
        output, down: into the residual stream.
        gate_up: state between attention and MLP to gate and up.
    """

    attention: Product
    output: Product
    gate_up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]
    scaling: float


class FusedStep:
    """One decode step; created by `of`."""

    def __init__(self, layers: Sequence[Any], norm: Norm, config: PretrainedConfig, head_size: int) -> None:
        self._norm = norm
        self._kv_heads: int = config.num_key_value_heads
        self._groups: int = config.num_attention_heads // config.num_key_value_heads
        self._head_size = head_size
        self._epsilon: float = layers[0].before.variance_epsilon
        self._layers = [_fused(layer) for layer in layers]

    @classmethod
    @torch.inference_mode()
    def of(cls, layers: Sequence[Any], norm: Norm, config: PretrainedConfig, head_size: int) -> FusedStep | None:
        """Create a step from the parts of the layers (`fast_backbone`) and the last norm; None if unsupported."""
        linears = [linear for layer in layers for linear in layer.linears]
        in_8_bits = all(type(m) is Int8Linear for m in linears)
        known = in_8_bits or all(type(m) in (nn.Linear, PrepackedLinear) for m in linears)
        if not known or any(is_hooked(m) or (not in_8_bits and not is_plain(m.weight)) for m in linears):
            return None
        norms = [norm, *(each for layer in layers for each in (layer.before, layer.between))]
        if any(each.weight.dtype != torch.float32 or each.weight.device.type != "cpu" for each in norms):
            return None
        if any(x.query_norm is not None or x.gate.bias is not None or x.up.bias is not None for x in layers):
            return None
        large = not in_8_bits and sum(m.in_features * m.out_features for m in linears) * 4 > LARGEST
        if large or len({each.variance_epsilon for each in norms}) > 1:
            return None
        return cls(layers, norm, config, head_size)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, inputs: dict[int, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Map the embeddings of the next tokens of B texts to final-norm states, both [B, 1, H], and grow the cache.

        Args:
            cos, sin: tables at the tokens' positions, [head size] or [B, 1, 1, head size], for `rotate`.
            inputs: receives the inputs of the layers that are its keys.
            mask: added to the attention scores, [B, 1, 1, keys]; None: each token sees all.
        """
        x, size = x[:, 0], self._head_size
        queries = self._kv_heads * self._groups
        rotated = queries + self._kv_heads  # heads
        for i, layer in enumerate(self._layers):
            if i in inputs:
                inputs[i] = x[:, None]
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
        """Divide x [B, H] by the root mean square of each row; one row takes two operations instead of ten."""
        if len(x) == 1:
            row = x[0]
            return x * (torch.dot(row, row).item() / len(row) + self._epsilon) ** -0.5
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(self._epsilon).rsqrt_()


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Compute transformers' `x * cos + rotate_half(x) * sin` for [1, heads, T, head size], with negated sines in the
    first half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _fused(layer: Any) -> _Layer:
    readers = (layer.query, layer.key, layer.value)
    if isinstance(layer.query, Int8Linear):
        return _Layer(
            JoinedInt8(readers, layer.before.weight.detach()),
            JoinedInt8([layer.output]),
            JoinedInt8([layer.gate, layer.up], layer.between.weight.detach()),
            JoinedInt8([layer.down]),
            layer.activation,
            layer.attention.scaling,
        )
    prepacked = isinstance(layer.query, PrepackedLinear)
    attention = torch.cat([reader.weight for reader in readers]) * layer.before.weight
    bias = torch.cat([reader.bias for reader in readers]) if layer.query.bias is not None else None
    gate_up = torch.cat([layer.gate.weight, layer.up.weight]) * layer.between.weight
    return _Layer(
        _product(attention, bias, prepacked),
        _product(layer.output.weight, layer.output.bias, prepacked),
        _product(gate_up, None, prepacked),
        _product(layer.down.weight, layer.down.bias, prepacked),
        layer.activation,
        layer.attention.scaling,
    )


def _product(weight: Tensor, bias: Tensor | None, prepacked: bool) -> Product:
    if not prepacked:
        weight = weight.detach()
        return lambda x: linear(x, weight, bias)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return PrepackedLinear(module).forward
