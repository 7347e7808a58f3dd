"""The target's log-probabilities of a draft's tokens: what engines return, and all that a `LogprobHead` reads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOWEST = -20.0  # clip of a log-probability; engines report some as -inf
_LEAST_LEFT = 1e-6  # clip of the probability outside the first choices
_ROWS = 256  # tokens per chunk of the output layer, which bounds the memory
_CACHED_LOGITS = 2**20  # logits per chunk on a CPU, small enough for its cache


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of T tokens, each after all tokens before it.

    Attributes:
        ids: int64 [T], the tokens.
        own: float32 [T], their log-probabilities.
        top_ids: int64 [T, k], the target's k first choices, the likeliest first.
        top: float32 [T, k], their log-probabilities.
    """

    ids: Tensor
    own: Tensor
    top_ids: Tensor
    top: Tensor

    @property
    def is_greedy_choice(self) -> Tensor:
        """bool [T]: whether the token is the target's first choice."""
        return self.ids == self.top_ids[..., 0]  # a tie counts as another choice

    @property
    def entropy(self) -> Tensor:
        """Entropy of the first k choices and of all other tokens taken as one, in nats, float32 [T].

        It is at most the entropy of the whole distribution."""
        top = self.top.clamp_min(LOWEST)
        chances = top.exp()
        left = (1 - chances.sum(-1)).clamp_min(_LEAST_LEFT)
        return -(chances * top).sum(-1) - left * left.log()

    def at_temperature(self, temperature: float) -> TokenLogprobs:
        """The same with logits divided by a temperature of at most 1. All tokens but the first k are taken as one, so
        a probability is at most the true one."""
        if temperature == 1:
            return self
        left = (1 - self.top.exp().sum(-1, keepdim=True)).clamp_min(_LEAST_LEFT).log()
        total = (torch.cat([self.top, left], -1) / temperature).logsumexp(-1)
        return replace(self, own=self.own / temperature - total, top=self.top / temperature - total[..., None])

    def first(self, k: int) -> TokenLogprobs:
        """The same with the first `k` choices only."""
        return replace(self, top_ids=self.top_ids[..., :k], top=self.top[..., :k])

    def part(self, rows: Tensor) -> TokenLogprobs:
        """Some of the tokens, [n] indices."""
        return TokenLogprobs(self.ids[rows], self.own[rows], self.top_ids[rows], self.top[rows])

    @property
    def features(self) -> Tensor:
        """Numbers that a `LogprobHead` reads, float32 [T, `n_features(k)`]: log-probability, gap to the first choice,
        rank (k: not among the first k), entropy over the first k and the rest, the rest's mass, the first k, and
        whether the token is the first choice. All are scaled to a few units. More dimensions may lead."""
        own, top = self.own.clamp_min(LOWEST), self.top.clamp_min(LOWEST)
        left = (1 - top.exp().sum(-1)).clamp_min(_LEAST_LEFT)
        rank = (self.top > self.own[..., None]).sum(-1).float()
        columns = [own / 3, (top[..., 0] - own) / 3, rank.log1p(), self.entropy, left.log() / 3]
        return torch.cat([torch.stack([*columns, self.is_greedy_choice.float()], -1), top / 3], dim=-1)


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """The tokens of all parts, one after the other."""
    return TokenLogprobs(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenLogprobs)))


def n_features(k: int) -> int:
    return 6 + k


def certain_features(n: int, k: int) -> Tensor:
    """Features of n tokens that the target wrote itself: as if it had been certain of each. [n, `n_features(k)`]"""
    row = torch.full((k,), LOWEST)
    row[0] = 0.0
    zeros = torch.zeros(n, dtype=torch.long)
    return TokenLogprobs(zeros, torch.zeros(n), zeros[:, None].expand(n, k), row.expand(n, k)).features


@torch.no_grad()
def read_logprobs(hidden: Tensor, ids: Tensor, logits: Callable[[Tensor], Tensor], k: int) -> TokenLogprobs:
    """Compute log-probabilities from hidden states.

    Args:
        hidden: [T, H], the final-norm states before the tokens.
        ids: int64 [T].
        logits: the output layer, [n, H] -> [n, V].
    """
    own, top_ids, top = [], [], []
    for states, some in zip(hidden.split(_ROWS), ids.split(_ROWS), strict=True):
        scores = logits(states)
        few = max(1, _CACHED_LOGITS // scores.shape[-1]) if scores.device.type == "cpu" else _ROWS
        for part, own_ids in zip(scores.split(few), some.split(few), strict=True):
            part = part.float()
            total = part.logsumexp(-1, keepdim=True)
            best, chosen = part.topk(k, dim=-1)
            chosen[:, 0] = part.argmax(-1)  # of equals the one that greedy decoding takes
            own.append((part.gather(-1, own_ids[:, None]) - total)[:, 0])
            top_ids.append(chosen)
            top.append(best - total)
    return TokenLogprobs(ids, torch.cat(own), torch.cat(top_ids), torch.cat(top))


class TokenTexts:
    """Hashed byte n-grams and flags of tokens' texts, so that a `LogprobHead` fits any vocabulary.

    Args:
        tokenizer: of the target.
        end_ids: its end tokens, which count as one empty text.
        buckets: number of hash values.
    """

    FLAGS = 5  # has a digit, an operator, a line end, a letter; ends the answer

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], buckets: int) -> None:
        self._tokenizer, self._end_ids, self._buckets = tokenizer, frozenset(end_ids), buckets
        self._known: dict[int, tuple[list[int], list[float]]] = {}

    def of(self, ids: Iterable[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hash values of all tokens, one after another, the offset of each token's first, [n], and the
        flags of each token, float32 [n, FLAGS]."""
        values: list[int] = []
        offsets: list[int] = []
        flags: list[list[float]] = []
        for id in ids:
            known = self._known.get(id) or self._add(id)
            offsets.append(len(values))
            values += known[0]
            flags.append(known[1])
        return torch.tensor(values), torch.tensor(offsets), torch.tensor(flags).reshape(-1, self.FLAGS)

    def _add(self, id: int) -> tuple[list[int], list[float]]:
        ends = id in self._end_ids
        text = "" if ends else str(self._tokenizer.decode([id]))
        shown = b"<" + text.encode() + b">"
        grams = {shown, *(shown[i : i + n] for n in (1, 2, 3, 4) for i in range(len(shown) - n + 1))}
        flags = (
            any(c.isdigit() for c in text),
            any(c in "+-*/=×÷%<>^" for c in text),
            "\n" in text,
            any(c.isalpha() for c in text),
            ends,
        )
        self._known[id] = sorted({zlib.crc32(g) % self._buckets for g in grams}), [float(flag) for flag in flags]
        return self._known[id]
