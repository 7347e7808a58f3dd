"""Medusa (arXiv 2401.10774): small heads on the model's last state, one for each of the next few tokens.

All heads read the same state, so their proposals are independent. The saved heads are a folder with `config.json` and
`model.safetensors`, in the format that vLLM loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from parse_infer.errors import ModelError
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.head_files import (
    check_shape,
    check_sizes,
    known_fields,
    load_state,
    read_config,
    read_weights,
    save_head,
)
from parse_infer.token_drafters.proposer import TokenTree
from parse_infer.token_drafters.tree import chain, likeliest_tree

ARCHITECTURES = ("MedusaModel",)


@dataclass
class MedusaConfig:
    """Content of config.json; field names are those of vLLM's Medusa checkpoints.

    Attributes:
        hidden_size, vocab_size: of the verifying model.
        num_heads: number of proposed tokens.
        num_hidden_layers: residual blocks in each head.
        truncated_vocab_size: number of tokens the heads can propose; `token_map` lists them.
        target_num_hidden_layers: layers of the verifying model; None if the checkpoint lacks the number.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_hidden_layers: int = 1
    truncated_vocab_size: int | None = None
    target_num_hidden_layers: int | None = None

    def __post_init__(self) -> None:
        self.truncated_vocab_size = self.truncated_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return {"architectures": [ARCHITECTURES[0]], "model_type": "medusa"} | asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MedusaConfig:
        """Build a config. Raise ValueError for a missing key, and for an unsupported key that affects the heads."""
        known = known_fields(values, cls, {})
        try:
            return cls(**known)
        except TypeError as error:
            raise ModelError(f"config.json of Medusa heads is incomplete: {error}") from error


class _Block(nn.Module):
    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(h, h, bias=False) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """All heads together."""

    token_map: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = cast(int, config.truncated_vocab_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(config.hidden_size, size, bias=False) for _ in range(config.num_heads))
        # Only a truncated vocabulary needs a map in the checkpoint.
        self.register_buffer("token_map", torch.arange(size), persistent=size < config.vocab_size)

    def set_vocabulary(self, tokens: Sequence[int]) -> None:
        """Set the heads' vocabulary: truncated_vocab_size tokens of the model's vocabulary."""
        self.token_map.copy_(torch.tensor(list(tokens)))

    @property
    def token_ids(self) -> Tensor:
        """int64 [truncated_vocab_size]: the model's token id for each token of the heads."""
        return self.token_map

    @property
    def output_weights(self) -> list[Tensor]:
        """The output matrices."""
        return [cast(Tensor, lm_head.weight) for lm_head in self.lm_heads]

    def forward(self, states: Tensor) -> Tensor:
        """Map the model's final-norm states [..., H] to logits [num_heads, ..., truncated_vocab_size]. Head k predicts
        the token k + 2 positions after the last token read."""
        return torch.stack([lm_head(block(states)) for block, lm_head in zip(self.blocks, self.lm_heads, strict=True)])

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors, each atomically."""
        return save_head(folder, self, self.config.to_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: LanguageModel) -> MedusaHead:
        """Load heads for `model`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the heads were trained for another model.
        """
        folder = Path(folder)
        config = MedusaConfig.from_dict(read_config(folder))
        check_shape(str(folder), config, model)
        head = cls(config)
        load_state(head, read_weights(folder), str(folder), model)
        return head


class MedusaDrafter:
    """Proposes tokens with Medusa heads: the likeliest combinations as a tree, or one chain.

    Args:
        head: trained for `model`.
        model: the verifying model; its decoder captures its last states from now on.
        tokens: depth of the tree or length of the chain; default: the number of heads.
        top_k: children of a node; 1: a chain.
        tree_tokens: number of the most likely nodes that a tree keeps.

    Raises:
        ValueError: a size below 1 or beyond the model's context window, or more tokens than heads.
    """

    def __init__(
        self, head: MedusaHead, model: LanguageModel, tokens: int | None = None, top_k: int = 4, tree_tokens: int = 16
    ) -> None:
        n_heads = head.config.num_heads
        self.tokens = n_heads if tokens is None else tokens
        check_sizes(model, self.tokens, top_k, tree_tokens)
        if self.tokens > n_heads:
            raise ModelError(f"{n_heads} Medusa heads propose at most {n_heads} tokens, not {tokens}")
        if top_k > 1:
            enable_split_attention(model.model)  # trees need it
        self.head, self.model, self.top_k, self.tree_tokens = head, model, top_k, tree_tokens
        self.forwards = 0
        last = model.model.config.get_text_config(decoder=True).num_hidden_layers
        self._states = model.decoder.capture_hidden([last])

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        size = min(self.tokens, limit)
        if size < 1 or self.model.decoder.cached != len(ids) - 1:
            return TokenTree.chain(())  # the model must run a forward over its context first
        _, states = self._states.pop_hidden()
        if states is None:
            return TokenTree.chain(())
        logits = self.head(states[-1])[:size]
        self.forwards += 1
        if self.top_k > 1:
            return likeliest_tree(logits, self.head.token_ids, self.top_k, self.tree_tokens)
        return chain(logits, self.head.token_ids, self.head.config.vocab_size, sampling, generator)
