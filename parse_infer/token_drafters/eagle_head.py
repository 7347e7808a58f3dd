"""The head of EAGLE-3 (arXiv 2503.01840) and of its parallel form P-EAGLE (arXiv 2602.01469): one layer on features.

For each token the layer reads one feature vector and the embedding of the next token. The feature vector fuses hidden
states of a low, a middle and a high layer of the model. A saved head is a folder with `config.json` and
`model.safetensors`, in the format that vLLM and SGLang load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from parse_infer.errors import ModelError
from parse_infer.models.loading import LanguageModel
from parse_infer.token_drafters.head_files import (
    check_shape,
    known_fields,
    load_state,
    read_config,
    read_weights,
    save_head,
)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


@dataclass
class EagleConfig:
    """Content of config.json; field names are those of EAGLE-3 checkpoints.

    Attributes:
        hidden_size, vocab_size: of the verifying model.
        draft_vocab_size: number of tokens the head can propose; `d2t` maps them to the model's vocabulary.
        eagle_aux_hidden_state_layer_ids: layers whose inputs are the features.
        target_num_hidden_layers: layers of the verifying model; None if the checkpoint lacks the number.
        parallel_drafting, ptd_token_id: P-EAGLE, and the token whose embedding stands for future positions.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    parallel_drafting: bool = False
    ptd_token_id: int | None = None
    target_num_hidden_layers: int | None = None

    def __post_init__(self) -> None:
        self.eagle_aux_hidden_state_layer_ids = tuple(self.eagle_aux_hidden_state_layer_ids)
        if self.parallel_drafting and self.ptd_token_id is None:
            raise ModelError("a parallel EAGLE head needs ptd_token_id, the mask token for future positions")
        for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "draft_vocab_size"):
            if getattr(self, key) < 1:
                raise ModelError(f"{key} of an EAGLE head is {getattr(self, key)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads is {self.num_attention_heads}, which is not a multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}"
            )

    def to_dict(self) -> dict[str, Any]:
        shared = {"architectures": [ARCHITECTURES[0]], "model_type": "llama", "num_hidden_layers": 1}
        shared |= {"hidden_act": "silu", "tie_word_embeddings": False, "target_hidden_size": self.hidden_size}
        return shared | asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EagleConfig:
        """Build a config. Raise ValueError for a missing key, and for an unsupported key that affects the layer."""
        rope = values.get("rope_parameters") or {}
        values = {"rope_theta": rope.get("rope_theta", 10000.0), **values}
        fixed = {
            **{"num_hidden_layers": 1, "hidden_act": "silu", "target_hidden_size": values.get("hidden_size")},
            **{"rope_parameters": {"rope_theta": values["rope_theta"], "rope_type": "default"}},
        }
        if "rope_type" not in rope:
            fixed["rope_parameters"] = {"rope_theta": values["rope_theta"]}
        known = known_fields(values, cls, fixed)
        if known.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= known.keys():
            known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
        try:
            return cls(**known)
        except TypeError as error:
            raise ModelError(f"config.json of an EAGLE-3 head is incomplete: {error}") from error


class _Attention(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, 2H], positions [B, T], mask bool [B, 1, T, past + T] -> ([B, T, H], keys and values so far)."""
        d = self.config.head_dim
        q, k, v = (p(x).unflatten(-1, (-1, d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (_rotate(t, positions, self.config.rope_theta) for t in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary position embeddings in Llama's half layout to [B, heads, T, D]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(c), _MLP(c)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(3)
        )


class EagleHead(nn.Module):
    """The head. `forward` runs its layer; `logits` maps the output to token logits."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        n_features = len(config.eagle_aux_hidden_state_layer_ids)
        self.fc = nn.Linear(n_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.parallel_drafting:
            self.mask_hidden = nn.Parameter(torch.zeros(1, n_features * config.hidden_size))
        # d2t holds offsets: the model's token is the head's token plus d2t[token].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, tokens: Sequence[int]) -> None:
        """Set the head's vocabulary: draft_vocab_size ascending tokens of the model's vocabulary."""
        if len(tokens) != self.config.draft_vocab_size or list(tokens) != sorted(set(tokens)):
            raise ModelError(f"the head's vocabulary must be {self.config.draft_vocab_size} ascending tokens")
        ids = torch.tensor(list(tokens), device=self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer.

        Args:
            hidden: [B, T, H], fused features (`fc` of the captured states) or the head's own output instead.
            embeddings: [B, T, H], embedding of the next token at each position.
            positions: [B, T].
            mask: bool [B, 1, T, past + T]; None: all tokens see all.
            past: keys and values of earlier tokens.

        Returns:
            The output [B, T, H] before the final norm, and keys and values of all tokens.
        """
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        attended, cache = layer.self_attn(x, positions, mask, past)
        hidden = hidden + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), cache

    def logits(self, output: Tensor) -> Tensor:
        """[..., H] -> [..., draft_vocab_size]"""
        return self.lm_head(self.norm(output))

    @property
    def token_ids(self) -> Tensor:
        """int64 [draft_vocab_size]: the model's token id for each token of the head."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def output_weights(self) -> list[Tensor]:
        """The output matrices."""
        return [self.lm_head.weight]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors, each atomically."""
        return save_head(folder, self, self.config.to_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: LanguageModel) -> EagleHead:
        """Load a head for `model`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the head was trained for another model.
        """
        folder = Path(folder)
        config = EagleConfig.from_dict(read_config(folder))
        _check_model(str(folder), config, model)
        state = read_weights(folder)
        state.pop("embed_tokens.weight", None)  # use the model's embedding instead
        if config.draft_vocab_size < config.vocab_size and "d2t" not in state:
            raise ModelError(
                f"the EAGLE-3 head {folder} proposes {config.draft_vocab_size} of {config.vocab_size} tokens, but has "
                "no d2t map to the model's tokens: export the head again with the map"
            )
        head = cls(config)
        load_state(head, {"d2t": head.d2t, "t2d": head.t2d} | state, str(folder), model)
        return head


def _check_model(name: str, config: EagleConfig, model: LanguageModel) -> None:
    check_shape(name, config, model)
    layers = model.model.config.get_text_config(decoder=True).num_hidden_layers
    for layer in config.eagle_aux_hidden_state_layer_ids:
        if not 0 <= layer <= layers:
            raise ModelError(
                f"the EAGLE-3 head {name} reads layer {layer}, but {model.name!r} has {layers} layers: "
                "use a head trained for it"
            )
