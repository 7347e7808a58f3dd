"""Controller that measures whether drafts pay, so that PARSE is seldom slower than the target alone.

The benefit depends on the load, because a saturated target gains less from drafts. The controller therefore compares
answers within one load bucket: about 1, 2, 4, 8, … requests on a server of the target, those of other clients
included. For a new bucket it extrapolates. Drafts that do not pay at a lower load do not pay here. Drafts that pay at
a higher load, or with a large speedup at a lower one, are used first and compared soon after.

Concurrent requests share the target. A request with a draft slows the requests beside it, so in a mixture both kinds
take about the same time. The controller therefore sends both kinds in bursts. It counts an answer only if nearly all
concurrent requests are of the same kind. A burst goes on until its counted answers have ended, because otherwise only
the quick ones would end among their own kind. A comparison that changes the choice is repeated soon, because few
answers vary much and servers warm up.

A burst of useless drafts is expensive. A few single answers therefore measure the accepted share first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MIN_SAMPLES = 4  # answers of each kind before a comparison
CLEAR_SPEEDUP = 2.0  # from here on, one answer of the target alone is enough for a comparison
EXPLORE_EVERY = 64  # every 64th burst, or later where it costs more, uses the slower kind in case it has become faster
EARLY_EXPLORE_EVERY = 4  # the same after a comparison that changed the choice, or for an extrapolated choice
MIN_SPEEDUP = 1.05  # drafts pay from here on, because a smaller gain may be noise
SPEEDUP_DECAY_PER_DOUBLING = 1.5  # twice the load divides a speedup by this (1.4 and 1.5 measured, 1 to 8 requests)
WINDOW = 10  # approximate number of answers in an average; at least two bursts
MIN_SAME_KIND_SHARE = 0.8  # an answer counts if this share of the concurrent requests is of its kind
MAX_LONGER = 4  # a burst waits for its counted answers for at most this multiple of its size
MIN_ACCEPTED_SHARE = 0.05  # below this accepted share, drafts are not tried at a new load


@dataclass
class DecayedRate:
    """Exponentially decayed average per token."""

    n: int = 0
    amount: float = 0.0
    tokens: float = 0.0

    @property
    def rate(self) -> float:
        return self.amount / self.tokens if self.tokens else 0.0

    def note(self, amount: float, tokens: float, last: int = WINDOW) -> None:
        """Add one answer; the average covers about `last` answers."""
        self.n += 1
        old = 1 - 1 / last
        self.amount = old * self.amount + amount
        self.tokens = old * self.tokens + tokens


@dataclass
class _Load:
    """Measurements at one load, by kind: False for the target alone, True for answers with a draft."""

    paces: dict[bool, DecayedRate] = field(default_factory=lambda: {False: DecayedRate(), True: DecayedRate()})
    """Seconds per token."""
    since: int = 0
    """Answers started since the last burst of the slower kind."""
    pays: bool | None = None
    """Whether drafts paid when last compared."""
    confirmed: bool = False
    """Whether a burst of the slower kind followed the last change of `pays`."""
    burst: int = 1
    """Size of a burst."""
    started: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Bursts before the first comparison."""

    @property
    def speedup(self) -> float | None:
        """Speedup of answers with a draft over the target alone; None before enough samples."""
        alone, drafted = self.paces[False], self.paces[True]
        needed = max(MIN_SAMPLES, self.burst // 2)
        if drafted.n < needed or not drafted.rate or not alone.n:
            return None
        speedup = alone.rate / drafted.rate
        return speedup if alone.n >= needed or (self.burst == 1 and speedup >= CLEAR_SPEEDUP) else None


@dataclass
class _Burst:
    """Answers of one kind, one started after the other.

    Attributes:
        left: answers to start.
        spare: answers that may follow, uncounted, until the counted ones have ended.
        counted: counted answers in flight.
    """

    drafted: bool = False
    left: int = 0
    spare: int = 0
    counted: int = 0
    ended: bool = False
    """Whether the last answer was a spare one."""


@dataclass
class InFlight:
    """A request in flight.

    Attributes:
        drafted: whether the request gets a draft.
        load: requests on a server of the target at its start, itself included.
        counts: whether enough concurrent requests were of its kind at its start.
    """

    drafted: bool
    load: int
    counts: bool = False


class Controller:
    """Tracks the time of answers with a draft and of the target alone, at each load."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)
        self._kept = DecayedRate()  # accepted draft tokens
        self._in_flight = {False: 0, True: 0}
        self._burst = _Burst()

    def begin(self, load: int = 1) -> InFlight:
        """Choose the kind of this engine's only answer, at a load as in `answering`. It needs no cleanup."""
        return InFlight(self._choose(load, 1), load, counts=True)

    @contextmanager
    def answering(self, running: int = 1, load: int | None = None) -> Iterator[InFlight]:
        """Choose the kind of an answer and count it as in flight during the `with` block.

        Args:
            running: requests of this engine in flight, this one included.
            load: requests on a server of the target; None: `running`.
        """
        load = running if load is None else load
        answer = InFlight(self._choose(load, running), load)
        burst = self._burst
        self._in_flight[answer.drafted] += 1
        answer.counts = not burst.ended and self._among_its_kind(answer)
        burst.counted += answer.counts
        try:
            yield answer
        finally:
            self._in_flight[answer.drafted] -= 1
            burst.counted -= answer.counts

    def note(self, answer: InFlight, seconds: float, tokens: int, load: int = 1, kept: int | None = None) -> None:
        """Record a complete answer. Call this inside its `answering` block, if it has one.

        Args:
            load: requests on a server of the target now.
            kept: accepted draft tokens; None if acceptance does not measure the draft's use (threshold above 1).
        """
        if answer.drafted:
            self._kept.note(tokens if kept is None else kept, tokens)
        low, high = sorted((load, answer.load))
        if answer.counts and self._among_its_kind(answer) and high < 2 * low:
            last = max(WINDOW, 2 * _burst(sum(self._in_flight.values())))
            self._at(math.sqrt(low * high)).paces[answer.drafted].note(seconds, tokens, last)

    def pace(self, drafted: bool, load: int = 1) -> float:
        """Seconds per token of recent answers; 0 without any."""
        return self._at(load).paces[drafted].rate

    def _at(self, load: float) -> _Load:
        return self._loads[_bucket(load)]

    def _choose(self, load: int, running: int) -> bool:
        burst = self._burst
        if not burst.left and not (burst.counted and burst.spare):
            drafted, size = self._next_burst(load, running)
            burst = self._burst = _Burst(drafted, size, MAX_LONGER * size if size > 1 else 0)
        burst.ended = not burst.left
        if burst.ended:
            burst.spare -= 1
        else:
            burst.left -= 1
        return burst.drafted

    def _next_burst(self, load: int, running: int) -> tuple[bool, int]:
        """Choose the kind and size of the next burst."""
        if self._kept.n < MIN_SAMPLES:
            return self._in_flight[True] < MIN_SAMPLES - self._kept.n, 1
        here, size = self._at(load), _burst(running)
        here.burst = size
        pays, explore_every = self._drafts_pay(_bucket(load))
        if pays is None:  # where the load changes fast, no answer may count: then kinds take turns
            kind = min((True, False), key=lambda kind: (here.paces[kind].n, here.started[kind]))
            here.started[kind] += 1
            return kind, size
        here.since += 1
        ratio = here.speedup
        if ratio is not None and pays != here.pays:
            here.pays, here.confirmed = pays, False
        if here.pays is not None and not here.confirmed and size > 1 and self._kept.rate >= MIN_ACCEPTED_SHARE:
            explore_every = EARLY_EXPLORE_EVERY
        cost = 1.0 if ratio is None else max(ratio, 1 / ratio)
        if here.since < explore_every * size * cost:
            return pays, 1
        here.since, here.confirmed = 0, True
        return not pays, size

    def _drafts_pay(self, bucket: int) -> tuple[bool | None, int]:
        """Return whether drafts pay (None: measure now), and after how many bursts to try the other kind."""
        known = {at: speedup for at, each in sorted(self._loads.items()) if (speedup := each.speedup) is not None}
        if bucket in known:
            return known[bucket] >= MIN_SPEEDUP, EXPLORE_EVERY
        lower = {at: speedup for at, speedup in known.items() if at < bucket}
        if any(speedup < 1 for speedup in lower.values()):
            return False, EXPLORE_EVERY
        if any(speedup >= 1 for at, speedup in known.items() if at > bucket):
            return True, EARLY_EXPLORE_EVERY
        if self._kept.rate < MIN_ACCEPTED_SHARE:
            return False, EXPLORE_EVERY
        if any(speedup >= SPEEDUP_DECAY_PER_DOUBLING ** (bucket - at) for at, speedup in lower.items()):
            return True, EARLY_EXPLORE_EVERY
        return None, 0

    def _among_its_kind(self, answer: InFlight) -> bool:
        return self._in_flight[answer.drafted] >= MIN_SAME_KIND_SHARE * sum(self._in_flight.values())


def _bucket(load: float) -> int:
    """The nearest power of two: 6 to 11 requests are about 8, so that a load about a power of two has one bucket."""
    return round(math.log2(load))


def _burst(running: int) -> int:
    """Size of a burst. It includes the answers that start before older requests of the other kind complete."""
    return MIN_SAMPLES + 2 * (running - 1) if running > 1 else 1
