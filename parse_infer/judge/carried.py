"""State of a judge of single tokens between two blocks of an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Carried:
    """A judge's state after the answer's first `tokens` tokens. Later tokens of the answer are the target's own.

    Attributes:
        doubt: pooled doubt about the accepted draft tokens.
        memory: recurrent state of a `LogprobHead`; empty at the answer's start, and for other heads.
        usual: whether the drafts are like those of the training (`UsualDrafts`); None: not known yet.
        seen: what `UsualDrafts.look` remembers.
    """

    tokens: int = 0
    doubt: float = -math.inf
    memory: tuple[float, ...] = ()
    usual: bool | None = None
    seen: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenScores:
    """A judge's result on the T tokens of a block.

    Attributes:
        logits: float32 [T], the validity logit of the answer up to and including each token.
        doubt: float32 [T], the pooled doubt.
        memory: float32 [T, width], the state after each token; None for a head without one.
        usual, seen: see `Carried`. Of an unusual draft, tokens equal to the first choice are valid up to the first
            other token, and nothing behind it.
    """

    logits: Tensor
    doubt: Tensor
    memory: Tensor | None = None
    usual: bool | None = True
    seen: tuple[float, ...] = ()

    def carried(self, tokens: int, cut: int) -> Carried:
        """What the judge carries into the next block if the answer has `tokens` tokens, the last `cut` of this one."""
        memory = () if self.memory is None else tuple(self.memory[cut - 1].tolist())
        return Carried(tokens, float(self.doubt[cut - 1]), memory, self.usual, self.seen)
