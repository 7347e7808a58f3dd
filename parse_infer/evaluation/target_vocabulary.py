"""Extend a draft model with a reduced vocabulary to its target's vocabulary.

Across tokenizers, transformers assists through text: it decodes without special tokens and encodes again in every
round. So the draft model sees neither chat template nor end token. With a shared vocabulary, transformers passes token
ids instead.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import TokenMap


def in_target_vocabulary(draft: LanguageModel, target: LanguageModel, tokens: TokenMap) -> PreTrainedModel:
    """Copy the draft model with shared layers and the target's vocabulary.

    A target token that maps to several draft tokens gets the mean of their embeddings. A target token without a draft
    token gets the logit minus infinity.

    Args:
        tokens: map from the draft model's tokenizer to the target's.
    """
    model = draft.model
    weights = [*model.parameters(), *model.buffers()]
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
    size = target.model.config.get_text_config(decoder=True).vocab_size
    pieces = [tokens.from_target(token) for token in range(size)]
    other.set_input_embeddings(_embedding(model.get_input_embeddings(), pieces))
    other.set_output_embeddings(_Output(model.get_output_embeddings(), tokens, size, model.device))
    other.config.get_text_config(decoder=True).vocab_size = size
    return other


def _embedding(own: nn.Module, pieces: list[tuple[int, ...]]) -> nn.Embedding:
    """Input embedding [V, H] over the target's vocabulary; zeros for padding."""
    weight: Tensor = own.weight  # type: ignore[assignment]
    device = weight.device
    flat = torch.tensor([piece for token in pieces for piece in token], device=device)
    ends = torch.tensor([len(token) for token in pieces], device=device).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    with torch.no_grad():
        read = own(torch.arange(len(weight), device=device))  # some embedding modules scale their output
        return nn.Embedding.from_pretrained(nn.functional.embedding_bag(flat, read, starts, mode="mean"))


class _Output(nn.Module):
    """Output layer with logits [..., V] over the target's vocabulary."""

    def __init__(self, own: nn.Module, tokens: TokenMap, size: int, device: torch.device) -> None:
        super().__init__()
        self.own, self.size = own, size
        self.of_draft, self.of_target = (
            torch.tensor(ids, device=device) for ids in (tokens.draft_ids, tokens.target_ids)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.own(hidden)
        spread = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        spread[..., self.of_target] = logits[..., self.of_draft]
        return spread
