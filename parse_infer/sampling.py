"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one decode.

    Attributes:
        temperature: 0 chooses the most likely token (greedy); above 0 divides the logits by it.
        top_p: keep the smallest set of most likely tokens whose probabilities add up to at least this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: seed of a fresh random generator for each decode; None draws from PyTorch's global one.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie above 0 and at most at 1, not {self.top_p}")
        if isinstance(self.top_k, bool) or int(self.top_k) != self.top_k or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number of at least 0 (0 keeps all tokens), not {self.top_k}")
        if self.seed is not None and (isinstance(self.seed, bool) or int(self.seed) != self.seed):
            raise ValueError(f"seed must be a whole number or None, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A fresh generator on `device` seeded with `seed`; None where there is no seed."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Token chosen from logits, row by row; no synchronisation with the device.

    Args:
        logits: [..., V].
        generator: random generator on the logits' device; unused when greedy.

    Returns:
        int64 [...].
    """
    if sampling.greedy:
        return logits.argmax(-1)
    probabilities, ids = _candidates(logits, sampling)
    chosen = draw(probabilities, generator)[..., None]
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [..., V] (float32) that `choose` draws from; sampling must not be greedy."""
    probabilities, ids = _candidates(logits, sampling)
    if ids is not None:
        probabilities = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, probabilities)
    return probabilities / probabilities.sum(-1, keepdim=True)


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One index [...] for each row of probabilities [..., V], which need not add up to 1."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities of the tokens that may be chosen, and their ids (None: all in order).

    The order is transformers': temperature, then top-k, then top-p on what is left.
    """
    scores, ids = logits.float() / sampling.temperature, None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = scores.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        scores, ids = scores.sort(dim=-1, descending=True)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        mass_before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(mass_before >= sampling.top_p, 0.0)
    return probabilities, ids
