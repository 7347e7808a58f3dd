"""Heads of tokens as modules for training."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.logprob_head import NO_DOUBT, LogprobHead, pool_doubt
from parse_infer.judge.stream.head import StreamHead
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts, certain_features


class TokenModel(nn.Module):
    """Base of the modules that score prefixes of drafts by a doubt about each token.

    Args:
        texts: the target's tokens.
        noise, certain_share: see `LogprobTrainingConfig`.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over all cuts of an optimiser step

    def __init__(self, texts: TokenTexts, noise: float = 0.0, certain_share: float = 0.0) -> None:
        super().__init__()
        self.texts, self.noise, self.certain_share = texts, noise, certain_share

    def features(self, own: Tensor, top: Tensor, ids: Tensor, first: Tensor) -> Tensor:
        """Return `TokenLogprobs.features` [B, T, F], in training with noise.

        Args:
            own: float32 [B, T], log-probabilities of the draft's tokens, padded on the right.
            top: float32 [B, T, k], log-probabilities of the target's first choices.
            ids, first: int64 [B, T], the draft's tokens and the first choices.
        """
        is_choice = ids == first
        if self.training and self.noise:
            own, top = self._noisy(own, top, is_choice)
        features = TokenLogprobs(ids, own, first[..., None], top).features
        if self.training and self.certain_share:
            shown = is_choice & (torch.rand_like(own) < self.certain_share)
            features = torch.where(shown[..., None], certain_features(1, top.shape[-1]).to(features.device), features)
        return features

    def pooled(
        self, each: Tensor, is_choice: Tensor, cuts: Tensor, head: LogprobHead | StreamHead
    ) -> dict[str, Tensor]:
        """Return {"logits": float32 [B, K]} of validity, arbitrary in padding.

        Training adds up the doubt, because any token may be the wrong one. Evaluation pools it as verdicts do, by the
        head's sharpness.

        Args:
            each: float32 [B, T], the doubt about each token.
            is_choice: bool [B, T], the tokens that are the target's first choice.
            cuts: int64 [B, K], number of draft tokens in each prefix, at least 1; negative for padding.
        """
        sharpness = 1.0 if self.training else head.config.sharpness
        doubt = pool_doubt(each.masked_fill(is_choice, NO_DOUBT), sharpness)
        return {"logits": head.bias - doubt.gather(-1, (cuts - 1).clamp_min(0))}

    def _noisy(self, own: Tensor, top: Tensor, is_choice: Tensor) -> tuple[Tensor, Tensor]:
        """Add noise; a token among the first choices keeps its place there."""
        among = (top == own[..., None]).float()  # [B, T, k]
        moved = top + self.noise * (2 * torch.rand_like(top) - 1)
        alone = own + self.noise * (2 * torch.rand_like(own) - 1)
        own = torch.where(among.any(-1), (moved * among).sum(-1) / among.sum(-1).clamp_min(1), alone)
        top = moved.sort(-1, descending=True).values
        return torch.where(is_choice, top[..., 0], own), top


class LogprobModel(TokenModel):
    """Scores prefixes of drafts from stored log-probabilities, without the target.

    Args:
        head: the initialised head.
        texts, noise, certain_share: as in `TokenModel`.
    """

    def __init__(self, head: LogprobHead, texts: TokenTexts, noise: float = 0.0, certain_share: float = 0.0) -> None:
        super().__init__(texts, noise, certain_share)
        self.head = head

    def forward(self, own: Tensor, top: Tensor, ids: Tensor, first: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        """Compute the logits of validity; arguments as of `features` and `pooled`."""
        each, _ = self.head(self.features(own, top, ids, first), ids, first, self.texts)
        return self.pooled(each, ids == first, cuts, self.head)

    def exported(self, facts: ValidityConfig, train_problems: Collection[str] = ()) -> ValidityAdapter:
        """Return the adapter as trained, without threshold and metrics; `facts` holds how the data was read."""
        head = copy.deepcopy(self.head).cpu().float()
        assert facts.logprobs is not None
        config = replace(facts, logprobs={"head": asdict(head.config), **facts.logprobs})
        return ValidityAdapter(config, head, train_problems=frozenset(train_problems))
