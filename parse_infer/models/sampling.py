"""How the next token is chosen from logits: for one text, or for a batch whose rows have settings of their own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

_GREEDY = 1e-5  # lower temperatures would bring logits out of range


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return _is_finite(value) and int(value) == value  # type: ignore[call-overload]


def seed_of(*parts: object) -> int:
    """A seed of 63 bits that depends on all parts (by their text)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one decode.

    Attributes:
        temperature: 0 chooses the most likely token (greedy), and so does anything below 1e-5, as in vLLM; else the
            logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probabilities add up to at least this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: what all random numbers derive from; None draws them from PyTorch's global generator.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature must be a finite number of at least 0 (0 is greedy), not {self.temperature!r}"
            )
        if not _is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a number above 0 and at most 1, not {self.top_p!r}")
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number of at least 0 (0 keeps all tokens), not {self.top_k!r}")
        object.__setattr__(self, "top_k", int(self.top_k))
        if self.seed is not None:
            if not _is_whole(self.seed) or not -(2**63) <= self.seed < 2**63:
                raise ValueError(f"seed must be a whole number of at most 63 bits or None, not {self.seed!r}")
            object.__setattr__(self, "seed", int(self.seed))

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY

    def generator(self, device: torch.device, *purpose: object) -> torch.Generator | None:
        """A fresh generator on `device` for one purpose (a role, a round); None where there is no seed.

        Different purposes have different random numbers: what one model has drawn must not be drawn again by another.
        """
        if self.seed is None:
            return None
        return torch.Generator(device).manual_seed(seed_of(self.seed, *purpose) if purpose else self.seed)


def without(logits: Tensor, banned: Tensor | None) -> Tensor:
    """Logits [..., V] in which the tokens `banned` (int64 [n]) have no chance; None bans nothing."""
    return logits if banned is None else logits.index_fill(-1, banned, -torch.inf)


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


def uniform_numbers(sampling: Sampling, n: int) -> list[float]:
    """The `n` numbers in [0, 1) that a row of a batch with this seed samples with; none for a greedy row.

    Raises:
        ValueError: a sampled row without a seed.
    """
    if sampling.greedy:
        return []
    if sampling.seed is None:
        raise ValueError("a sampled row needs a seed of its own: Sampling(temperature=…, seed=…)")
    return torch.rand(n, generator=torch.Generator().manual_seed(sampling.seed)).tolist()


class RowSampling:
    """The settings of the B rows of a batch.

    A row turns one of its own random numbers into a token by the inverse of the cumulative distribution. So what it
    samples depends on its logits and seed alone, not on its neighbours.
    """

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        sampled = [s for s in settings if not s.greedy]
        self._greedy = torch.tensor([s.greedy for s in settings], device=device)
        self._all_greedy = not sampled
        self._filtered = any(s.top_p < 1 or s.top_k > 0 for s in sampled)
        self._temperature = column([1.0 if s.greedy else s.temperature for s in settings])
        self._top_p, self._top_k = column([s.top_p for s in settings]), column([s.top_k for s in settings])

    def choose(self, logits: Tensor, uniform: Sequence[float]) -> Tensor:
        """Next tokens int64 [B] from logits [B, V] and one number in [0, 1) for each row. No synchronisation."""
        best = logits.argmax(-1)
        if self._all_greedy:
            return best
        scores, ids = logits.float() / self._temperature, None
        if self._filtered:
            scores, ids = scores.sort(dim=-1, descending=True, stable=True)
            rank = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill((self._top_k > 0) & (rank >= self._top_k), -torch.inf)
        probabilities = scores.softmax(-1)
        if self._filtered:
            probabilities = _nucleus(probabilities, self._top_p)
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1:]
        wanted = torch.tensor(uniform, device=logits.device)[:, None] * total
        index = (cumulative <= wanted).sum(-1, keepdim=True)
        last = (cumulative < total).sum(-1, keepdim=True)  # the last token that can be drawn, should `wanted` round up
        index = torch.minimum(index, last)
        chosen = index if ids is None else ids.gather(-1, index)
        return torch.where(self._greedy, best, chosen[:, 0])


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
    return (_nucleus(probabilities, sampling.top_p) if sampling.top_p < 1 else probabilities), ids


def _nucleus(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """Descending probabilities [..., V] without those behind a mass of `top_p`; exactly 1 keeps all of them."""
    mass_before = probabilities.cumsum(-1) - probabilities
    behind = mass_before >= top_p
    return probabilities.masked_fill(behind & (top_p < 1) if isinstance(top_p, Tensor) else behind, 0.0)
