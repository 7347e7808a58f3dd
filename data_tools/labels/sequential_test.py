"""Sequential test on counts of rollouts: whether a prefix keeps the target's chance of a right answer.

Let p be the target's chance from the bare prompt. A prefix *keeps* p if its own chance is at least (1 - margin) p,
and *loses* p if its own chance is at most margin p. Wald's sequential probability ratio test (1945) compares these
two hypotheses after every round of rollouts. The test stops once one hypothesis is likely enough, and draws another
round otherwise. As p is unknown, both likelihoods are averaged over the posterior of p, given the prompt's rollouts
and a uniform prior. A chance between the two limits fits neither hypothesis and mostly stays undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

_CHANCES = [(i + 0.5) / 256 for i in range(256)]


class Tally(NamedTuple):
    """Number of right answers in `total` rollouts."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total

    def log_likelihood(self, chance: float) -> float:
        """Log-probability of these rollouts, in their order, where each is right with probability 0 < chance < 1."""
        return self.right * math.log(chance) + (self.total - self.right) * math.log1p(-chance)


class Verdict(NamedTuple):
    """A label and the probability that it is right; `valid` is None where the rollouts do not decide."""

    valid: bool | None
    confidence: float


class LabelRule(Protocol):
    """Maps rollouts to labels, for the prefixes of all drafts of one problem.

    Attributes:
        step: rollouts per round.
        limit: maximum number of rollouts from one prefix.
    """

    @property
    def step(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def foregone(self) -> Verdict | None:
        """The verdict for all prefixes of the problem where rollouts cannot change the verdict; else None."""

    def decide(self, prefix: Tally) -> Verdict:
        """Return the verdict for a prefix, given all rollouts from the prefix so far."""


@dataclass(frozen=True)
class SequentialTest:
    """The rule for sampled rollouts.

    Args:
        prompt: rollouts from the bare prompt.
        margin: share of the target's chance that a prefix may lose and still keep it, above 0 and below 0.5.
        max_error: maximum probability of a wrong label, below 0.5.
        step, limit: see `LabelRule`.
    """

    prompt: Tally
    margin: float
    max_error: float
    step: int
    limit: int

    @cached_property
    def foregone(self) -> Verdict | None:
        """Undecided where even `limit` wrong rollouts from a prefix could not prove the prefix invalid.

        This happens where the target is rarely right from the prompt; a label could then only be "valid"."""
        kept = probability_kept(self.prompt, Tally(0, self.limit), self.margin)
        return Verdict(None, 1 - kept) if kept > self.max_error else None

    def decide(self, prefix: Tally) -> Verdict:
        kept = probability_kept(self.prompt, prefix, self.margin)
        confidence = max(kept, 1 - kept)
        decided = confidence >= 1 - self.max_error and not self.foregone
        return Verdict(kept > 0.5 if decided else None, confidence)


@dataclass(frozen=True)
class GreedyRule:
    """The rule for one greedy rollout, which decides with certainty; `prompt` is the rollout from the bare prompt."""

    prompt: Tally
    step: int = 1
    limit: int = 1

    @property
    def foregone(self) -> Verdict | None:
        """Valid where the target is wrong from the bare prompt, because no prefix lowers a chance of zero."""
        return None if self.prompt.right else Verdict(True, 1.0)

    def decide(self, prefix: Tally) -> Verdict:
        return Verdict(prefix.right >= self.prompt.right, 1.0)


@dataclass(frozen=True)
class WithoutRollouts:
    """The rule for labels of whole drafts: their answers decide, and unfinished drafts stay undecided."""

    step: int = 1
    limit: int = 1

    @property
    def foregone(self) -> Verdict | None:
        return Verdict(None, 0.5)

    def decide(self, prefix: Tally) -> Verdict:
        raise RuntimeError("labels of whole drafts ask for no rollout")


def probability_kept(prompt: Tally, prefix: Tally, margin: float) -> float:
    """Return the posterior probability that the prefix keeps the target's chance, with a prior of one half.

    Args:
        prompt, prefix: rollouts from the bare prompt, and from the prefix.
        margin: see `SequentialTest`.
    """
    weights = [prompt.log_likelihood(chance) for chance in _CHANCES]
    kept, lost = (
        [weight + prefix.log_likelihood(share * chance) for weight, chance in zip(weights, _CHANCES, strict=True)]
        for share in (1 - margin, margin)
    )
    top = max(kept + lost)
    of_kept, of_lost = (math.fsum(math.exp(value - top) for value in values) for values in (kept, lost))
    return of_kept / (of_kept + of_lost)


def fewest_rollouts(margin: float, max_error: float) -> int:
    """Return the minimum number of rollouts that can decide a prefix, even for a target that is always right."""
    return math.ceil(math.log((1 - max_error) / max_error) / math.log((1 - margin) / margin))
