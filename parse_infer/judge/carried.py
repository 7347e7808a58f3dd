"""State of a judge of single tokens between two blocks of an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
