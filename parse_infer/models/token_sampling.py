"""Sampling of the next token from logits: for one text, or for a batch with separate settings per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parse_infer.errors import SettingsError
from parse_infer.settings.sampling import Sampling, seed_of


def random_generator(sampling: Sampling, device: torch.device, *purpose: object) -> torch.Generator | None:
    """Create a generator on `device` for one purpose (a role, a round); None without a seed.

    Each purpose gets its own random numbers, so that two models do not draw with the same noise.
    """
    if sampling.seed is None:
        return None
    return torch.Generator(device).manual_seed(seed_of(sampling.seed, *purpose) if purpose else sampling.seed)


def without(logits: Tensor, banned: Tensor | None) -> Tensor:
    """Set the logits [..., V] of the tokens `banned` (int64 [n]) to -inf; None bans nothing."""
    return logits if banned is None else logits.index_fill(-1, banned, -torch.inf)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Choose a token for each row of logits, without a device synchronisation.

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
    """Return the probabilities [..., V] (float32) that `choose` draws from; `sampling` must not be greedy."""
    probabilities, ids = _candidates(logits, sampling)
    if ids is not None:
        probabilities = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, probabilities)
    return probabilities / probabilities.sum(-1, keepdim=True)


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index [...] for each row of probabilities [..., V], which need not sum to 1."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def uniform_numbers(sampling: Sampling, n: int) -> list[float]:
    """Return the `n` uniform numbers in [0, 1) for a row of a batch with this seed; [] for a greedy row.

    Raises:
        ValueError: a sampled row without a seed.
    """
    if sampling.greedy:
        return []
    if sampling.seed is None:
        raise SettingsError("a sampled row needs a seed of its own: Sampling(temperature=…, seed=…)")
    return torch.rand(n, generator=torch.Generator().manual_seed(sampling.seed)).tolist()


class RowSampling:
    """Sampling settings of the B rows of a batch.

    Each row maps one of its own random numbers to a token by the inverse of the cumulative distribution. Its samples
    therefore depend on its logits and seed alone, not on other rows.
    """

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        sampled = [s for s in settings if not s.greedy]
        greedy = [row for row, s in enumerate(settings) if s.greedy]
        self._greedy_rows = torch.tensor(greedy, dtype=torch.long, device=device)
        self._all_greedy = not sampled
        self._filtered = any(s.top_p < 1 or s.top_k > 0 for s in sampled)
        self._temperature = column([1.0 if s.greedy else s.temperature for s in settings])
        self._top_p, self._top_k = column([s.top_p for s in settings]), column([s.top_k for s in settings])

    def choose(self, logits: Tensor, uniform: Sequence[float]) -> Tensor:
        """Choose tokens int64 [B] from logits [B, V] and one number in [0, 1) per row, without synchronisation."""
        if self._all_greedy:
            return logits.argmax(-1)
        scores, ids = logits.float() / self._temperature, None
        if self._filtered:
            scores, ids = scores.sort(dim=-1, descending=True, stable=True)
            rank = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill((self._top_k > 0) & (rank >= self._top_k), -torch.inf)
        probabilities = scores.softmax(-1)
        if self._filtered:
            probabilities = _nucleus(probabilities, self._top_p)
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        drawn = torch.tensor(uniform, device=logits.device)[:, None] * total
        index = torch.searchsorted(cumulative, drawn, right=True)
        last = torch.searchsorted(cumulative, total)  # the last possible token, in case `drawn` rounds up
        index = torch.minimum(index, last)
        chosen = index if ids is None else ids.gather(-1, index)
        chosen[self._greedy_rows] = logits[self._greedy_rows].argmax(-1, keepdim=True)
        return chosen[:, 0]


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities of the candidate tokens, and their ids (None: the whole vocabulary in order).

    As in transformers: temperature, then top-k, then top-p on the remaining tokens.
    """
    scores, ids = logits.float() / sampling.temperature, None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = scores.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        scores, ids = scores.sort(dim=-1, descending=True)
    probabilities = scores.softmax(-1)
    return (_nucleus(probabilities, sampling.top_p) if sampling.top_p < 1 else probabilities), ids


def _nucleus(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """Set descending probabilities [..., V] after a mass of `top_p` to 0; exactly 1 keeps all."""
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped = (mass_before >= top_p) & (mass_before > 0)  # keeps the first, however small `top_p`
    return probabilities.masked_fill(dropped & (top_p < 1) if isinstance(top_p, Tensor) else dropped, 0.0)
