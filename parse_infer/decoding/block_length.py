"""The length of a block: how many tokens the draft model writes before the target reads them.

A longer block saves target forwards. But the tokens after the first rejected one are wasted. This module measures the
costs and how often draft tokens survive verification, and ends a block where one more token stops paying:

    survival of the block so far x seconds per token of the answer  <  seconds to draft and to read one more token

The left side is what the next token is expected to save: if all tokens before it survive, it gives a token of the
answer, its own or the target's correction. This rule minimises the long-run time per token (marginal value theorem),
because survival falls with each token. Survival depends on the draft model's confidence, as in SpecDec++ (arXiv
2405.19715), and on the rejections in the last blocks. Costs are measured while decoding, as in Nightjar (arXiv
2512.22420).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

from parse_infer.decoding.adaptive import DecayedRate

EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 0.9995)
"""Bounds of the confidence classes. A class counts how many of its tokens survived."""
FIRST = 16  # tokens of the first block of a stream: the first text comes early, for one more forward of the target
LONGEST = 256  # tokens; more saves too little to delay the first text
LONGEST_S = 2.0  # seconds to draft a block: nothing of a stream arrives meanwhile
_TOKENS = 1000  # survival counts cover about this many tokens of each class
_READS = 50  # costs cover about this many blocks
_PACES = 40  # window of the pace, in blocks: short is noisy, long reacts late
_RECENT = 12  # recent rejections cover about this many blocks
_PRIOR = 4.0  # weight of the assumed survival of a confidence class, in tokens
_USUAL = 2.0  # weight of the long-run rejection rate against recent rejections, in rejections
REPLAYED = 32  # tokens of a block in a replay, where no length may depend on what was measured
_FEWEST = 8  # blocks before the first pause
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # tokens that the target writes alone while drafts do not pay


@dataclass(frozen=True)
class Costs:
    """Seconds of one draft token, of a target forward without tokens, and of each token in it."""

    draft_s: float
    forward_s: float
    read_s: float

    @property
    def per_token(self) -> float:
        """Seconds to draft and to read one more token."""
        return self.draft_s + self.read_s


def costs_of(draft_s: float, one_s: float, many_s: float, further: int) -> Costs:
    """Split the seconds of two target forwards, over one token and over `further` more, into fixed and per token."""
    read_s = min(max((many_s - one_s) / further, 0.0), one_s)
    return Costs(draft_s, one_s - read_s, read_s)


def pays(survival: float, costs: Costs, seconds_per_token: float) -> bool:
    """Whether one more draft token is expected to save time.

    Args:
        survival: probability that the target accepts all tokens of the block before it.
        seconds_per_token: long-run time per token of the answer.
    """
    return survival * seconds_per_token >= costs.per_token


def expected_pace(survivals: Sequence[float], costs: Costs) -> float:
    """Return the expected seconds per token of the answer, for blocks in which token i survives with probability
    `survivals[i]` if all tokens before it do. A rejected token is replaced by the target's own."""
    reached = [1.0, *accumulate(survivals, mul)]
    accepted = sum(reached[1:]) + 1 - reached[-1]
    return (costs.forward_s + len(survivals) * costs.per_token) / accepted


@dataclass
class _Share:
    """A share that forgets old observations."""

    passed: float
    seen: float

    @property
    def value(self) -> float:
        return self.passed / self.seen

    def note(self, passed: bool) -> None:
        keep = 1 - 1 / _TOKENS
        self.passed, self.seen = self.passed * keep + passed, self.seen * keep + 1


@dataclass
class _Line:
    """Least-squares line through points (x, y) that forgets old points."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def note(self, x: float, y: float) -> None:
        keep = 1 - 1 / _READS
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, getattr(self, name) * keep + value)

    def fit(self) -> tuple[float, float]:
        """Return (intercept, slope), both at least 0. Points at one x give half of y to each."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = mean_y / mean_x / 2
        if spread > (0.05 * mean_x) ** 2:
            slope = (self.xy / self.weight - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


@dataclass
class BlockLength:
    """Measures costs and survival over the requests of one `threshold_class`, and ends blocks by the rule above.

    Attributes:
        pause: tokens that the target writes alone before the next block; 0 while drafts pay.
        costs: the costs measured so far; None before the first block.
    """

    pause: int = 0
    costs: Costs | None = None
    _survival: list[_Share] = field(default_factory=lambda: [_Share(_PRIOR * s, _PRIOR) for s in _prior()])
    _rejected: float = _USUAL
    _expected: float = _USUAL
    _draft: DecayedRate = field(default_factory=DecayedRate)
    _reads: _Line = field(default_factory=_Line)
    _pace: DecayedRate = field(default_factory=DecayedRate)
    _alone: DecayedRate = field(default_factory=DecayedRate)
    _last_pause: int = 0

    @property
    def longest(self) -> int:
        """Longest block, in tokens."""
        costs = self.costs
        if costs is None or costs.draft_s * LONGEST <= LONGEST_S:
            return LONGEST
        return max(FIRST, int(LONGEST_S / costs.draft_s))

    def survival_of(self, confidence: float) -> float:
        """Return the probability that a token of this confidence survives.

        The long-run share is raised to the ratio of recent rejections to expected rejections, where that is above 1.
        Near its threshold, a judge rejects more tokens of the same confidence than at the start of an answer.
        """
        return self._survival[bisect_right(EDGES, confidence)].value ** max(self._rejected / self._expected, 1.0)

    def end_after(self, survival: float) -> bool:
        """Whether a block ends whose tokens all survive with this probability."""
        costs = self.costs
        if costs is None:
            return survival < 0.5
        pace = self._pace.rate or 2 * costs.per_token
        return not pays(survival, costs, pace)

    def ending(self) -> Callable[[float], bool]:
        """Begin a block. The result receives the confidence of each token and returns whether the block ends there."""
        survival = 1.0

        def ends(confidence: float) -> bool:
            nonlocal survival
            survival *= self.survival_of(confidence)
            return self.end_after(survival)

        return ends

    def note(
        self,
        confidences: Sequence[float],
        accepted: int,
        rejected: bool,
        draft_s: float,
        read_s: float,
        read: int,
        added: int | None = None,
    ) -> None:
        """Record a block.

        Args:
            confidences: the draft model's probability of each of its tokens.
            accepted: number of its accepted tokens.
            rejected: whether the target rejected the next token.
            draft_s, read_s: seconds to draft and to read the block.
            read: tokens that the target read, uncached context included.
            added: the target's own tokens after the accepted ones; default: 1 in place of a rejected token.
        """
        was_rejected = rejected and accepted < len(confidences)
        tried = [self._survival[bisect_right(EDGES, c)].value for c in confidences[: accepted + was_rejected]]
        keep = 1 - 1 / _RECENT
        self._rejected = keep * self._rejected + (1 - keep) * _USUAL + was_rejected
        self._expected = keep * self._expected + (1 - keep) * _USUAL - sum(map(math.log, tried))
        for confidence in confidences[:accepted]:
            self._survival[bisect_right(EDGES, confidence)].note(True)
        if was_rejected:
            self._survival[bisect_right(EDGES, confidences[accepted])].note(False)
        self._draft.note(draft_s, len(confidences), _READS)
        self._reads.note(read, read_s)
        self.costs = costs = Costs(self._draft.rate, *self._reads.fit())
        # A long prompt is not part of the pace.
        gained = accepted + (rejected if added is None else added)
        self._pace.note(draft_s + costs.forward_s + costs.read_s * len(confidences), gained, _PACES)
        self.pause = self._last_pause = self.next_pause()

    def note_alone(self, seconds: float, tokens: int) -> None:
        """Record tokens that the target wrote alone."""
        self._alone.note(seconds, tokens, _PACES)
        self.pause = 0

    def next_pause(self) -> int:
        """Return the length of the next pause: 0 if drafts pay, else twice the last one."""
        costs = self.costs
        assert costs is not None
        if self._pace.n < _FEWEST or self._pace.rate <= (self._alone.rate or costs.forward_s + costs.read_s):
            return 0
        return min(max(_FIRST_PAUSE, 2 * self._last_pause), _LONGEST_PAUSE)


def threshold_class(threshold: float) -> int:
    """Return the class of a threshold: its rounded log-odds within -7..9; 10 above 1. Draft tokens survive a lenient
    threshold more often than a strict one, so each class is measured on its own."""
    if threshold > 1:
        return 10
    share = min(max(threshold, 1e-6), 1 - 1e-6)
    return min(max(round(math.log(share / (1 - share))), -7), 9)


def _prior() -> list[float]:
    """Assumed survival of each confidence class before any token: its middle."""
    return [(low + high) / 2 for low, high in pairwise([0.0, *EDGES, 1.0])]
