"""What a token drafter says: a tree of guessed tokens. Whoever guesses does it through `TokenProposer.guess`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parse_infer.models.sampling import Sampling

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """A tree of guessed tokens behind the context.

    Attributes:
        tokens: n token ids of the guided model.
        parents: for each the index of the token it follows, `ROOT` the context's last; parents stand before children,
            and siblings differ unless they were drawn at random.
        drawn_from: float32 [n, V], the distribution each token was drawn from, the same for siblings; None for tokens
            that were chosen without chance.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    drawn_from: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], drawn_from: Tensor | None = None) -> TokenTree:
        return cls(tokens, range(ROOT, len(tokens) - 1), drawn_from)

    @property
    def is_chain(self) -> bool:
        return list(self.parents) == list(range(ROOT, len(self.tokens) - 1))


class TokenProposer(Protocol):
    """Guesses the next few tokens of one model. It is told the whole context every time and keeps up by itself."""

    @property
    def forwards(self) -> int:
        """Forwards of the drafter's own model so far (0 without one)."""
        ...

    def guess(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        """Guess what follows `ids`, at most `limit` tokens deep; an empty guess where there is nothing to say.

        Args:
            sampling: what the model samples with; a drafter that draws its tokens should draw them alike.
            generator: random generator on the model's device.
        """
        ...
