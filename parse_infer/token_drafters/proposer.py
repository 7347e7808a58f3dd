"""`TokenProposer`, the interface of token-level drafters, and `TokenTree`, their result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parse_infer.settings.sampling import Sampling

ROOT = -1
OnRead = Callable[[int, float, int], None]


@dataclass(frozen=True)
class TokenTree:
    """A tree of proposed tokens after the context.

    Attributes:
        tokens: n token ids of the verifying model.
        parents: index of each token's parent; `ROOT` is the context's last token. Parents precede children, and
            siblings differ.
        drawn_from: float32 [n, V], the distribution of each token of a drawn chain; None for deterministic proposals.
        on_read: called after the model's forward with the number of accepted tokens, the forward's seconds, and the
            tokens that it read, uncached context included.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    drawn_from: Tensor | None = None
    on_read: OnRead | None = None

    @classmethod
    def chain(
        cls, tokens: Sequence[int], drawn_from: Tensor | None = None, on_read: OnRead | None = None
    ) -> TokenTree:
        return cls(tokens, range(ROOT, len(tokens) - 1), drawn_from, on_read)

    @property
    def is_chain(self) -> bool:
        return list(self.parents) == list(range(ROOT, len(self.tokens) - 1))


class TokenProposer(Protocol):
    """Proposes the next few tokens of one model. Each call passes the whole context; the proposer tracks changes."""

    @property
    def forwards(self) -> int:
        """Forwards of the proposer's own model so far; 0 without a model."""
        ...

    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        """Propose a tree of at most `limit` levels after `ids`; the tree may be empty.

        Args:
            sampling: the model's sampling settings, which a proposer that draws its tokens should use too.
            generator: random generator on the model's device.
        """
        ...
