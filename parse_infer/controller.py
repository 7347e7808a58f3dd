"""Decides by measurement whether a draft pays, so that PARSE is never slower than the target alone.

What pays depends on the load: a target that is saturated gains less from drafts, or nothing. So requests are compared
with those that began while about as many others were under way (1, 2 to 3, 4 to 7, …).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

TRIALS = 3  # answers of either kind before they are compared
EXPLORE = 64  # of so many requests one is answered the slower way, to notice when it has become the faster one
MEMORY = 0.9  # weight of what was known, beside one more answer


@dataclass
class _Pace:
    """Seconds and tokens of the last answers of one kind, the older the less."""

    sent: int = 0
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    def note(self, seconds: float, tokens: int) -> None:
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + tokens


class Controller:
    """Keeps what answers of both kinds cost, with a draft and by the target alone, at each load."""

    def __init__(self) -> None:
        self._paces: defaultdict[int, tuple[_Pace, _Pace]] = defaultdict(lambda: (_Pace(), _Pace()))

    def drafts(self, load: int = 1) -> bool:
        """Whether the next request gets a draft.

        Args:
            load: requests under way, this one included.
        """
        with_draft, alone = self._paces[load.bit_length()]
        known = with_draft.tokens and alone.tokens
        if not known or min(with_draft.sent, alone.sent) < TRIALS:
            chosen = with_draft.sent <= alone.sent
        else:
            chosen = with_draft.seconds_per_token <= alone.seconds_per_token
            if (with_draft.sent + alone.sent) % EXPLORE == 0:
                chosen = not chosen
        (with_draft if chosen else alone).sent += 1
        return chosen

    def note(self, drafted: bool, seconds: float, tokens: int, load: int = 1) -> None:
        """An answer that began at this load is complete."""
        self._paces[load.bit_length()][not drafted].note(seconds, tokens)

    def pace(self, drafted: bool, load: int = 1) -> float:
        """Seconds for a token of the last answers; 0 where there was none."""
        return self._paces[load.bit_length()][not drafted].seconds_per_token
