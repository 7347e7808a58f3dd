"""Sequential test on counts of rollouts: whether a prefix keeps the target's chance of a right answer.

Let p be the target's chance from the bare prompt. A prefix is valid if its own chance is at least (1 - margin) p, and
invalid if its own chance is at most margin p. A chance between the two limits gets no label.

For each label, Wald's sequential probability ratio (1945) compares the clearest case with the limit of the label: a
chance of p with (1 - margin) p, and a chance near zero with margin p. At the limit, and so beyond it, the ratio ever
reaches 1 / error with a probability of at most `error` (Ville's inequality), however many rounds are drawn. As p is
unknown, likelihoods are averaged over the posterior of p, given the prompt's rollouts and Jeffreys' prior.

A rollout that its budget cut off counts for neither side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

_CHANCES = np.append((np.arange(256) + 0.5) / 256, 1.0)
_JEFFREYS = -0.5 * np.log(_CHANCES * np.append(1 - _CHANCES[:-1], 1 / 256))  # up to a constant, with p = 1 possible
_LOST = (0.0, 0.25)  # chances near zero, as shares of the limit of an invalid prefix


class Tally(NamedTuple):
    """Number of right answers in `total` finished rollouts, beside `cut` rollouts that their budget cut off."""

    right: int
    total: int
    cut: int = 0

    @property
    def rollouts(self) -> int:
        return self.total + self.cut

    @property
    def share(self) -> float | None:
        """Share of right answers among the finished rollouts; None if all were cut off."""
        return self.right / self.total if self.total else None

    def log_likelihood(self, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Log-probability of the finished rollouts, in their order, where each is right with 0 <= chance <= 1."""
        wrong = self.total - self.right
        with np.errstate(divide="ignore"):  # log(0)
            of_right = self.right * np.log(chances) if self.right else np.zeros_like(chances)
            return of_right + (wrong * np.log1p(-chances) if wrong else 0.0)


class Label(NamedTuple):
    """A label and its confidence: for no chance of the prefix is a wrong label more likely than 1 - confidence.

    `valid` is None where the rollouts do not decide; the confidence is then 0.5.
    """

    valid: bool | None
    confidence: float


UNDECIDED = Label(None, 0.5)


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
    def foregone(self) -> Label | None:
        """The label of all prefixes of the problem where rollouts cannot change the label; else None."""

    def decide(self, prefix: Tally) -> Label:
        """Return the label of a prefix, given all rollouts from the prefix so far."""


@dataclass(frozen=True)
class SequentialTest:
    """The rule for sampled rollouts.

    Args:
        prompt: rollouts from the bare prompt.
        margin: share of the target's chance that a prefix may lose and still be valid, above 0 and below 0.5.
        max_error: maximum probability of a wrong label, below 0.5.
        step, limit: see `LabelRule`.
    """

    prompt: Tally
    margin: float
    max_error: float
    step: int
    limit: int

    @cached_property
    def foregone(self) -> Label | None:
        """Undecided where even `limit` wrong rollouts from a prefix could not prove the prefix invalid.

        This happens where the target is rarely right from the prompt; a label could then only be "valid"."""
        return UNDECIDED if self._decide(Tally(0, self.limit)).valid is None else None

    def decide(self, prefix: Tally) -> Label:
        return self.foregone or self._decide(prefix)

    def _decide(self, prefix: Tally) -> Label:
        for valid in (True, False):
            ratio = log_ratio(self.prompt, prefix, self.margin, valid)
            if ratio >= -math.log(self.max_error):
                return Label(valid, 1 - math.exp(-ratio))
        return UNDECIDED


@dataclass(frozen=True)
class GreedyRule:
    """The rule for one greedy rollout, which decides with certainty; `prompt` is the rollout from the bare prompt."""

    prompt: Tally
    step: int = 1
    limit: int = 1

    @property
    def foregone(self) -> Label | None:
        """Valid where the target is wrong from the bare prompt, because no prefix lowers a chance of zero.

        Undecided where the rollout from the bare prompt was cut off."""
        if not self.prompt.total:
            return UNDECIDED
        return None if self.prompt.right else Label(True, 1.0)

    def decide(self, prefix: Tally) -> Label:
        if not self.prompt.total or not prefix.total:
            return UNDECIDED
        return Label(prefix.right >= self.prompt.right, 1.0)


@dataclass(frozen=True)
class WithoutRollouts:
    """The rule for labels of whole drafts: their answers decide, or the draft stays undecided."""

    step: int = 1
    limit: int = 1

    @property
    def foregone(self) -> Label | None:
        return UNDECIDED

    def decide(self, prefix: Tally) -> Label:
        raise RuntimeError("labels of whole drafts ask for no rollout")


def log_ratio(prompt: Tally, prefix: Tally, margin: float, valid: bool) -> float:
    """Return the logarithm of the likelihood ratio for a label: its clearest case against its limit.

    Args:
        prompt, prefix: rollouts from the bare prompt, and from the prefix.
        margin: see `SequentialTest`.
        valid: the label.
    """
    weights = prompt.log_likelihood(_CHANCES) + _JEFFREYS

    def average(shares: Sequence[float]) -> float:
        """Log-likelihood of the rollouts, averaged over p and over chances of the prefix as shares of p."""
        terms = np.concatenate([weights + prefix.log_likelihood(share * _CHANCES) for share in shares])
        return float(np.logaddexp.reduce(terms)) - math.log(len(shares))

    if valid:
        return average([1.0]) - average([1 - margin])
    return average([share * margin for share in _LOST]) - average([margin])


def fewest_rollouts(margin: float, max_error: float) -> int:
    """Return the minimum of `max_rollouts` with which either label is possible, for a target that is always right."""
    n = math.ceil(math.log(max_error) / math.log1p(-margin))
    while SequentialTest(Tally(n, n), margin, max_error, step=n, limit=n).foregone:
        n += 1
    return n
