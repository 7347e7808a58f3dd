"""Head on log-probabilities as a module for training."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.logprob_head import NO_DOUBT, LogprobHead, pool_doubt
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts, certain_features


class LogprobModel(nn.Module):
    """Scores prefixes of drafts from stored log-probabilities, without the target.

    Args:
        head: the initialised head.
        texts: the target's tokens.
        noise, certain_share: see `LogprobTrainingConfig`.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over all cuts of an optimiser step

    def __init__(self, head: LogprobHead, texts: TokenTexts, noise: float = 0.0, certain_share: float = 0.0) -> None:
        super().__init__()
        self.head, self.texts = head, texts
        self.noise, self.certain_share = noise, certain_share

    def forward(self, own: Tensor, top: Tensor, ids: Tensor, first: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        """Compute the logits of validity.

        Args:
            own: float32 [B, T], log-probabilities of the draft's tokens, padded on the right.
            top: float32 [B, T, k], log-probabilities of the target's first choices.
            ids, first: int64 [B, T], the draft's tokens and the first choices.
            cuts: int64 [B, K], number of draft tokens in each prefix, at least 1; negative for padding.

        Returns:
            {"logits": float32 [B, K]}; arbitrary in padding.
        """
        is_choice = ids == first
        if self.training and self.noise:
            own, top = self._noisy(own, top, is_choice)
        features = TokenLogprobs(ids, own, first[..., None], top).features
        if self.training and self.certain_share:
            shown = is_choice & (torch.rand_like(own) < self.certain_share)
            features = torch.where(shown[..., None], certain_features(1, top.shape[-1]).to(features.device), features)
        each, _ = self.head(features, ids, first, self.texts)
        doubt = pool_doubt(each.masked_fill(is_choice, NO_DOUBT), self.head.config.sharpness)
        return {"logits": self.head.bias - doubt.gather(-1, (cuts - 1).clamp_min(0))}

    def _noisy(self, own: Tensor, top: Tensor, is_choice: Tensor) -> tuple[Tensor, Tensor]:
        """Add noise; a token among the first choices keeps its place there."""
        among = (top == own[..., None]).float()  # [B, T, k]
        moved = top + self.noise * (2 * torch.rand_like(top) - 1)
        alone = own + self.noise * (2 * torch.rand_like(own) - 1)
        own = torch.where(among.any(-1), (moved * among).sum(-1) / among.sum(-1).clamp_min(1), alone)
        top = moved.sort(-1, descending=True).values
        return torch.where(is_choice, top[..., 0], own), top

    def exported(self, facts: ValidityConfig, train_problems: Collection[str] = ()) -> ValidityAdapter:
        """Return the adapter as trained, without threshold and metrics; `facts` holds how the data was read."""
        head = copy.deepcopy(self.head).cpu().float()
        assert facts.logprobs is not None
        config = replace(facts, logprobs={"head": asdict(head.config), **facts.logprobs})
        return ValidityAdapter(config, head, train_problems=frozenset(train_problems))
