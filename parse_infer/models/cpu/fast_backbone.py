"""Faster backbone for Llama-like models, without the per-token overhead of transformers' forward.

The backbone uses the same modules and weights and gives the same results up to rounding. It omits masks for tokens
that see everything, the rotary table of each step, and a dozen small operations in each norm and rotation. For one
token of a small model on a CPU this overhead costs more than the matrix products (docs/reference/cpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from parse_infer.models.architecture import layer_windows, text_config
from parse_infer.models.attention import split_attention_forward
from parse_infer.models.cpu.fused_step import FusedStep, Norm, is_hooked, rotate
from parse_infer.models.cpu.int8_linear import Int8Linear
from parse_infer.models.growing_kv_cache import new_cache

_MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
_ROUNDINGS = 10  # tolerance, in roundings of half the dtype's epsilon
_IN_8_BITS = 0.05  # tolerance of 8-bit layers, whose inputs may be rounded to the next step (a 127th of the largest)
# Kinds of rotary position embedding whose angles depend on the position alone.
_ROTARY = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Layer:
    """The modules of one layer, and the factor of its attention scores."""

    attention: nn.Module
    scaling: float
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    query_norm: Norm | None
    key_norm: Norm | None
    before: Norm
    between: Norm
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    activation: nn.Module

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


class FastBackbone:
    """Maps token ids to final-norm hidden states, for one sequence. Created by `for_model`.

    Attributes:
        groups: query heads per head of keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        backbone = getattr(model, model.base_model_prefix)
        config = text_config(model)
        self._embed, self._norm, self._rotary = backbone.embed_tokens, backbone.norm, backbone.rotary_emb
        self._head_size: int = backbone.layers[0].self_attn.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self._cos, self._sin = torch.empty(0), torch.empty(0)
        self._backbone, self._config = backbone, config
        self._read_layers()

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> FastBackbone | None:
        """Create the backbone; None for other architectures, sliding windows or several devices."""
        backbone = getattr(model, model.base_model_prefix)
        if type(backbone).__name__ not in _MODELS or not type(backbone).__module__.startswith("transformers."):
            return None
        rotary = getattr(text_config(model), "rope_parameters", None) or {}
        windows = list(layer_windows(model).values())
        modules = list(model.modules())
        hooked = any(hasattr(m, "_hf_hook") for m in modules)  # accelerate moves weights or inputs
        devices = {p.device for p in model.parameters()}
        if rotary.get("rope_type") not in _ROTARY or windows != [None] or hooked or len(devices) != 1:
            return None
        return cls(model)

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None, captured: dict[int, Tensor]
    ) -> Tensor:
        """Run one forward; the cache grows by T tokens.

        Args:
            tokens, positions: int64 [1, T]; a chain has the positions after the cache.
            mask: attention mask of the trailing tokens, bool [1, 1, n, context + T] (`split_attention_forward`); None:
                the T tokens are a chain.
            captured: receives the inputs of the layers that are its keys.

        Returns:
            [1, T, H].
        """
        self._check_modules()
        n, past = tokens.shape[1], cache.get_seq_length()
        if past == 0:
            self._check_fused()
        x = self._embed(tokens)
        self._prepare_angles(past + n, x)
        if self._fused is not None and n == 1 and mask is None:
            return self._fused(x, self._cos[past], self._sin[past], cache, captured)
        at = past if n == 1 and mask is None else positions[0]
        cos, sin = self._cos[at], self._sin[at]
        if mask is None and n > 1 and past:
            mask = torch.empty(1, 1, 0, past + n, dtype=torch.bool, device=x.device)  # causal throughout
        for i, layer in enumerate(self._layers):
            if i in captured:
                captured[i] = x
            x = x + self._attention(i, layer, x, cos, sin, cache, mask)
            x = x + self._mlp(layer, x)
        return rms_norm(self._norm, x)

    @torch.inference_mode()
    def agrees(self, tokens: Tensor) -> bool:
        """Whether the model's own forward gives the same results on a few tokens, int64 [1, T].

        The check compares each part of each layer separately, on its input from the model's own forward. In 16 bits
        later layers amplify rounding errors: final states may differ by half their norm although each part is right
        (SmolLM2-135M in bfloat16). Over random models 32 to 1,024 wide, the embedded pair and SmolLM2, a part's rows
        differed by at most 4.4 roundings in bfloat16 and float16. The tolerance is ten roundings: 4 % in bfloat16.
        """
        own, n = _OwnStates.of(self._backbone, tokens), tokens.shape[1]
        if not len(self._layers) == len(own.attended) == len(own.fed) == len(own.entering) - 1:
            return False  # the model skips or repeats a part
        parts, cache = (slice(0, n - 1), slice(n - 1, n)), new_cache()
        self._prepare_angles(n, own.entering[0])
        pairs = [(self._embed(tokens), own.entering[0]), (rms_norm(self._norm, own.entering[-1]), own.hidden)]
        for i, layer in enumerate(self._layers):
            x, attended = own.entering[i], own.attended[i]
            ours = [self._attention(i, layer, x[:, p], self._cos[p], self._sin[p], cache, None) for p in parts]
            pairs += [(torch.cat(ours, dim=1), attended), (self._mlp(layer, x + attended), own.fed[i])]
            pairs += [(x + attended + own.fed[i], own.entering[i + 1])]
        info = torch.finfo(own.hidden.dtype)
        in_8_bits = any(isinstance(module, Int8Linear) for module in self._backbone.modules())
        tolerance = _IN_8_BITS if in_8_bits else max(_ROUNDINGS * info.eps / 2, 1e-5)
        same = max(_difference(a, b) for a, b in pairs) <= tolerance
        if not same or info.bits < 32:
            return same
        cache, positions = new_cache(), torch.arange(n, device=tokens.device)[None]  # includes the fused step
        whole = [self(tokens[:, p], positions[:, p], cache, None, {}) for p in parts]
        return _difference(torch.cat(whole, dim=1), own.hidden) <= (10 * _IN_8_BITS if in_8_bits else 1e-4)

    @property
    def steps_rows(self) -> bool:
        """Whether `step_rows` is available. Only this property detects changed weights for `step_rows`."""
        self._check_modules()
        self._check_fused()
        return self._fused is not None

    def step_rows(self, tokens: Tensor, slots: Tensor, rows: Cache, visible: Tensor) -> Tensor:
        """Run one token for each of B texts at their own positions.

        Args:
            tokens, slots: int64 [B, 1], token ids and positions.
            rows: keys and values, a `BatchedKVCache` after `place` with these slots.
            visible: bool [B, 1, 1, keys].

        Returns:
            [B, 1, H].
        """
        assert self._fused is not None
        x = self._embed(tokens)
        self._prepare_angles(visible.shape[-1], x)
        cos, sin = self._cos[slots][:, None], self._sin[slots][:, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        return self._fused(x, cos, sin, rows, {}, mask)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids to the first layer's input."""
        return self._embed(tokens)

    def final_norm(self, x: Tensor) -> Tensor:
        """Map the last layer's output to final-norm states."""
        return rms_norm(self._norm, x)

    def rotations(self, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for `rotate` of at least all positions below `end`, [T, head size], in `like`'s dtype."""
        self._prepare_angles(end, like)
        return self._cos, self._sin

    def current_layers(self) -> list[Layer]:
        """Return the modules of all layers; another list after a module was replaced."""
        self._check_modules()
        return self._layers

    def refresh(self) -> list[Layer]:
        """As `current_layers`; another list also after weights or hooks have changed."""
        self._check_modules()
        self._check_fused()
        return self._layers

    def _attention(
        self, i: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """Compute the attention update of a layer for its input [1, T, H]."""
        return layer.output(self._attend(i, layer, rms_norm(layer.before, x), cos, sin, cache, mask))

    @staticmethod
    def _mlp(layer: Layer, x: Tensor) -> Tensor:
        """Compute the MLP update of a layer for the state after its attention [1, T, H]."""
        y = rms_norm(layer.between, x)
        return layer.down(layer.activation(layer.gate(y)).mul_(layer.up(y)))

    def _attend(
        self, i: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        n, size = x.shape[1], self._head_size
        query, key = layer.query(x).view(1, n, -1, size), layer.key(x).view(1, n, -1, size)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rms_norm(layer.query_norm, query), rms_norm(layer.key_norm, key)
        query, key = rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin)
        value = layer.value(x).view(1, n, -1, size).transpose(1, 2)
        keys, values = cache.update(key, value, i)
        scaling = layer.scaling
        if n == 1 and mask is None:  # one token sees all keys, so heads of a group become queries of one head
            query = query.view(1, self._kv_heads, self.groups, size)
            out = nn.functional.scaled_dot_product_attention(query, keys, values, scale=scaling)
            return out.reshape(1, 1, -1)
        out, _ = split_attention_forward(layer.attention, query, keys, values, mask, scaling=scaling)
        return out.reshape(1, n, -1)

    def _check_modules(self) -> None:
        if not all(children[name] is module for children, name, module in self._children):
            self._read_layers()  # another library, such as peft, has wrapped linears

    def _read_layers(self) -> None:
        self._layers = [_layer(layer) for layer in self._backbone.layers]
        parts = (part for layer in self._backbone.layers for part in (layer.self_attn, layer.mlp))
        self._children = [(part._modules, name, child) for part in parts for name, child in part._modules.items()]
        self._fuse()

    def _fuse(self) -> None:
        self._fused = FusedStep.of(self._layers, self._norm, self._config, self._head_size)
        self._stamp = self._weights_stamp()

    def _check_fused(self) -> None:
        """Read the layers again if weights have changed or layers got hooks. This check runs at the start of an empty
        context (`seek([])`), because a cache from the old weights would be invalid."""
        if self._stamp != self._weights_stamp():
            self._read_layers()

    def _weights_stamp(self) -> list[Any]:
        weights = self._backbone.parameters()
        versions = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        return [*versions, *(is_hooked(linear) for layer in self._layers for linear in layer.linears)]

    def _prepare_angles(self, end: int, x: Tensor) -> None:
        """Extend the tables below position `end`: cosines, and sines with the signs for `rotate`; [T, head size]."""
        if end > len(self._cos) or self._cos.dtype != x.dtype or self._cos.device != x.device:
            cos, sin = self._rotary(x, torch.arange(max(1024, 2 * end), device=x.device)[None])
            half = self._head_size // 2
            self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        attention,
        attention.scaling,
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)),
        *(layer.input_layernorm, layer.post_attention_layernorm),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn),
    )


@dataclass(frozen=True)
class _OwnStates:
    """States in the model's own forward, [1, T, H] each.

    Attributes:
        entering: inputs of every layer and of the last norm.
        attended, fed: updates by the attention and by the MLP of each layer.
        hidden: final-norm states.
    """

    entering: list[Tensor]
    attended: list[Tensor]
    fed: list[Tensor]
    hidden: Tensor

    @classmethod
    def of(cls, backbone: Any, tokens: Tensor) -> _OwnStates:
        entering: list[Tensor] = []
        attended: list[Tensor] = []
        fed: list[Tensor] = []

        def note_input(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            entering.append(args[0] if args else kwargs["hidden_states"])

        handles = [
            m.register_forward_pre_hook(note_input, with_kwargs=True) for m in (*backbone.layers, backbone.norm)
        ]
        for layer in backbone.layers:
            handles.append(layer.self_attn.register_forward_hook(lambda m, args, output: attended.append(output[0])))
            handles.append(layer.mlp.register_forward_hook(lambda m, args, output: fed.append(output)))
        try:
            hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return cls(entering, attended, fed, hidden)


def _difference(ours: Tensor, own: Tensor) -> float:
    """Return the largest row difference of two [1, T, H] tensors, relative to the norm of the model's own row."""
    difference = torch.linalg.vector_norm(ours.float() - own.float(), dim=-1)
    return float((difference / torch.linalg.vector_norm(own.float(), dim=-1).clamp_min(1e-20)).max())


def rms_norm(norm: Norm, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
