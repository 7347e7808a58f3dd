"""A draft model with a reduced vocabulary as one that reads and writes all of its target's tokens.

transformers assists across tokenizers by way of text: it decodes without special tokens, so that the draft model sees
no chat template and no end, and encodes again in every round. Here the pair shares its tokens instead, and
transformers runs its code for that.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import TokenMap


def in_target_vocabulary(draft: LanguageModel, target: LanguageModel, tokens: TokenMap) -> PreTrainedModel:
    """A copy of the draft model that shares its layers and has the target's vocabulary.

    A token that is several of the draft model's is read as their mean, and one that is not among them is never written
    (its logit is minus infinity).

    Args:
        tokens: from the draft model's tokenizer to the target's.
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
    """What the draft model reads for each token of the target, [V, H]; zeros where it has nothing (padding)."""
    weight: Tensor = own.weight  # type: ignore[assignment]
    device = weight.device
    flat = torch.tensor([piece for token in pieces for piece in token], device=device)
    ends = torch.tensor([len(token) for token in pieces], device=device).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    with torch.no_grad():
        read = own(torch.arange(len(weight), device=device))  # some embeddings scale what they look up
        return nn.Embedding.from_pretrained(nn.functional.embedding_bag(flat, read, starts, mode="mean"))


class _Output(nn.Module):
    """Logits [..., V] over the target's vocabulary."""

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
