"""Sampling for a batch whose rows have settings and seeds of their own.

Each row draws its random numbers before decoding, from its own seed, and turns one of them into a token by the inverse
of the cumulative distribution. So what a row samples depends on its logits and seed alone, not on its neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from parse_infer.sampling import Sampling


def seed_of(*parts: object) -> int:
    """A seed of 63 bits that depends on all parts (by their text)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw(sampling: Sampling, n: int) -> list[float]:
    """The `n` uniform numbers in [0, 1) that a row with this seed samples with; none for a greedy row.

    Raises:
        ValueError: a sampled row without a seed.
    """
    if sampling.greedy:
        return []
    if sampling.seed is None:
        raise ValueError("a sampled row needs a seed of its own: Sampling(temperature=…, seed=…)")
    return torch.rand(n, generator=torch.Generator().manual_seed(sampling.seed)).tolist()


class RowSampling:
    """The settings of the B rows of a batch, as tensors on `device`."""

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        self.greedy = torch.tensor([s.greedy for s in settings], device=device)
        self.all_greedy = all(s.greedy for s in settings)
        self.filtered = any(s.top_p < 1 or s.top_k > 0 for s in settings if not s.greedy)
        self.temperature = torch.tensor([1.0 if s.greedy else s.temperature for s in settings], device=device)
        self.top_p = torch.tensor([s.top_p for s in settings], device=device)
        self.top_k = torch.tensor([s.top_k for s in settings], device=device)

    def choose(self, logits: Tensor, uniform: Sequence[float]) -> Tensor:
        """Next tokens int64 [B] from logits [B, V] and one number in [0, 1) for each row. No synchronisation.

        As in `parse_infer.sampling.choose`: temperature, then top-k, then top-p on what is left.
        """
        best = logits.argmax(-1)
        if self.all_greedy:
            return best
        scores, ids = logits.float() / self.temperature[:, None], None
        if self.filtered:
            scores, ids = scores.sort(dim=-1, descending=True, stable=True)
            rank = torch.arange(scores.shape[-1], device=scores.device)
            beyond = (self.top_k[:, None] > 0) & (rank >= self.top_k[:, None])
            scores = scores.masked_fill(beyond, -torch.inf)
        probabilities = scores.softmax(-1)
        if self.filtered:
            mass_before = probabilities.cumsum(-1) - probabilities
            # Exactly 1 means "keep all", whatever rounding makes of the sum.
            cut = (mass_before >= self.top_p[:, None]) & (self.top_p[:, None] < 1)
            probabilities = probabilities.masked_fill(cut, 0.0)
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1:]
        wanted = torch.tensor(uniform, device=logits.device)[:, None] * total
        index = (cumulative <= wanted).sum(-1, keepdim=True)
        last = (cumulative < total).sum(-1, keepdim=True)  # the last token that can be drawn, should `wanted` round up
        index = torch.minimum(index, last)
        chosen = index if ids is None else ids.gather(-1, index)
        return torch.where(self.greedy, best, chosen[:, 0])
