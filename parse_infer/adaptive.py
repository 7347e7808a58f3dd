"""Decides by measurement whether a draft pays, so that PARSE is never slower than the target alone.

What pays depends on the load: a target that is saturated gains less from drafts, or nothing. So answers are compared
with those that began and ended while about as many were under way (1, 2 to 3, 4 to 7, …), and where a load is new,
what is known of others holds: drafts that do not pay at a lower one do not pay here, and those that pay at a higher
one do. Drafts that pay so clearly at a lower load that they should here are used at first, and compared
somewhat later.

Answers under way at the same time share the target. One with a draft makes those beside it slower, so among a mixture
both kinds take about as long, whichever is better. Hence both are tried in bursts, and an answer counts where nearly
all those beside it are of its own kind.

A burst of drafts that are good for nothing is dear, so a few answers first show how much of them is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MIN_SAMPLES = 4  # answers of either kind before they are compared
EXPLORE_EVERY = 64  # one of so many bursts goes the slower way, to notice when it has become the faster one
EARLY_EXPLORE_EVERY = 4  # and one of so many where drafts are used because of what they brought at a lower load
SPEEDUP_DECAY_PER_DOUBLING = (
    1.5  # twice the load divides a speed-up by about so much (1.4 and 1.5 measured, from 1 to 8 requests)
)
WINDOW = 10  # about so many answers are remembered, or as many as a burst has
MIN_SAME_KIND_SHARE = 0.8  # of the answers beside one that counts, so many are of its kind
MIN_ACCEPTED_SHARE = (
    0.05  # where drafts bring a smaller share of the answers, they are not tried at a load that is new
)


@dataclass
class _DecayedRate:
    """Something for each token of the last answers, the older the less."""

    n: int = 0
    amount: float = 0.0
    tokens: float = 0.0

    @property
    def rate(self) -> float:
        return self.amount / self.tokens if self.tokens else 0.0

    def note(self, amount: float, tokens: int, last: int = WINDOW) -> None:
        """`last`: about so many answers are remembered."""
        self.n += 1
        old = 1 - 1 / last
        self.amount = old * self.amount + amount
        self.tokens = old * self.tokens + tokens


@dataclass
class _Load:
    """What is known about one load, by kind: False for the target alone, True for answers with a draft."""

    paces: dict[bool, _DecayedRate] = field(default_factory=lambda: {False: _DecayedRate(), True: _DecayedRate()})
    """Seconds."""
    since: int = 0
    """Answers that have begun since the slower way was tried."""

    @property
    def speedup(self) -> float | None:
        """Of answers with a draft, over the target alone. None: not known."""
        drafted = self.paces[True].rate
        if not drafted or min(pace.n for pace in self.paces.values()) < MIN_SAMPLES:
            return None
        return self.paces[False].rate / drafted


@dataclass
class InFlight:
    """An answer that has begun.

    Attributes:
        drafted: whether it gets a draft.
        load: requests that were under way when it began, itself included.
        alike: whether it counts, so far.
    """

    drafted: bool
    load: int
    counts: bool = False


class Controller:
    """Keeps what answers of both kinds take, with a draft and by the target alone, at each load."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)
        self._kept = _DecayedRate()  # of answers with a draft: tokens that it brought
        self._underway = {False: 0, True: 0}
        self._burst = (False, 0)  # the kind of the next answers, and how many they are

    def begin(self) -> InFlight:
        """Decide how an answer begins that no other one runs beside; a dropped answer leaves no trace."""
        return InFlight(self._choose(1), 1, counts=True)

    @contextmanager
    def answering(self, load: int = 1) -> Iterator[InFlight]:
        """Around an answer that others may run beside: decides how it begins.

        Args:
            load: requests under way, this one included.
        """
        answer = InFlight(self._choose(load), load)
        self._underway[answer.drafted] += 1
        answer.counts = self._among_its_kind(answer)
        try:
            yield answer
        finally:
            self._underway[answer.drafted] -= 1

    def note(self, answer: InFlight, seconds: float, tokens: int, load: int = 1, kept: int | None = None) -> None:
        """An answer is complete; called within its `with`, if it has one.

        Args:
            load: now.
            kept: tokens that its draft brought; None: it was there for something else.
        """
        if answer.drafted:
            self._kept.note(tokens if kept is None else kept, tokens)
        if answer.counts and self._among_its_kind(answer) and load.bit_length() == answer.load.bit_length():
            self._loads[load.bit_length()].paces[answer.drafted].note(seconds, tokens, max(WINDOW, _burst(load)))

    def pace(self, drafted: bool, load: int = 1) -> float:
        """Seconds for a token of the last answers; 0 where there was none."""
        return self._loads[load.bit_length()].paces[drafted].rate

    def _choose(self, load: int) -> bool:
        kind, left = self._burst
        if not left:
            kind, left = self._next_burst(load)
        self._burst = (kind, left - 1)
        return kind

    def _next_burst(self, load: int) -> tuple[bool, int]:
        """A kind, and how many answers begin that way."""
        if self._kept.n < MIN_SAMPLES:
            return self._underway[True] < MIN_SAMPLES - self._kept.n, 1
        here, size = self._loads[load.bit_length()], _burst(load)
        pays, patience = self._drafts_pay(load.bit_length())
        if pays is None:
            return here.paces[True].n <= here.paces[False].n, size
        here.since += 1
        if here.since < patience * size:
            return pays, 1
        here.since = 0
        return not pays, size

    def _drafts_pay(self, bucket: int) -> tuple[bool | None, int]:
        """Whether they do, None: to be found out at once; and after how many bursts the other way is tried."""
        known = {at: speedup for at, each in sorted(self._loads.items()) if (speedup := each.speedup) is not None}
        if bucket in known:
            return known[bucket] >= 1, EXPLORE_EVERY
        lower = {at: speedup for at, speedup in known.items() if at < bucket}
        if any(speedup < 1 for speedup in lower.values()):
            return False, EXPLORE_EVERY
        if any(speedup >= 1 for at, speedup in known.items() if at > bucket):
            return True, EXPLORE_EVERY
        if self._kept.rate < MIN_ACCEPTED_SHARE:
            return False, EXPLORE_EVERY
        if any(speedup >= SPEEDUP_DECAY_PER_DOUBLING ** (bucket - at) for at, speedup in lower.items()):
            return True, EARLY_EXPLORE_EVERY
        return None, 0

    def _among_its_kind(self, answer: InFlight) -> bool:
        return self._underway[answer.drafted] >= MIN_SAME_KIND_SHARE * sum(self._underway.values())


def _burst(load: int) -> int:
    """So many answers begin alike: those under way give way first."""
    return MIN_SAMPLES + 2 * (load - 1)
