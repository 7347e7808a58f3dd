"""Search for the labels of one draft's prefixes with as few rollouts as possible.

A prefix is valid if it keeps the target's chance of a right answer; a `LabelRule` decides from counts of right
rollouts. Two cases need no rollout: the draft's own answer labels the last prefix of a finished draft, and a right
answer makes all prefixes valid. In any other draft a binary search finds the first error, as in OmegaPRM (Luo et al.
2024, arXiv 2406.06592): prefixes before a valid prefix are valid, prefixes after an invalid prefix are invalid. Where
the rule cannot decide, the search continues on both sides: it looks for the last valid prefix before the undecided
prefixes, and for the first invalid prefix after them. The prefixes between these two stay undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from data_tools.labels.sequential_test import UNDECIDED, Label, LabelRule, Tally
from parse_infer.errors import ParseError


class PendingPrefix(NamedTuple):
    """The index of a prefix and the total number of rollouts that the search needs from it."""

    prefix: int
    rollouts: int


@dataclass(frozen=True)
class PrefixLabels:
    """Labels, values and confidences of the K prefixes.

    labels      None where the rollouts do not decide
    values      share of right rollouts among the finished ones; None for an inferred label, and without a finished one
    confidence  probability that the label is right; an inferred label takes the confidence of its source prefix
    """

    labels: list[bool | None]
    values: list[float | None]
    confidence: list[float]


class PrefixSearch:
    """Labels the K prefixes of one draft: `pending()` requests rollouts, and `record()` takes their counts.

    Args:
        n_prefixes: K, at least 1.
        rule: labels a prefix from its rollouts.
        own_answer: whether the draft's answer is right; None where only rollouts can tell, as for an unfinished draft.
        exhaustive: request rollouts from every prefix except the last prefix of a finished draft.

    Attributes:
        n_open: number of prefixes that may need rollouts: K, or K - 1 for a finished draft.
    """

    def __init__(self, n_prefixes: int, rule: LabelRule, own_answer: bool | None, exhaustive: bool = False) -> None:
        if n_prefixes < 1:
            raise ParseError("a draft without a prefix has nothing to label")
        self.rule, self.own_answer, self.exhaustive = rule, own_answer, exhaustive
        self.n_open = n_prefixes - (own_answer is not None)
        self._tallies: dict[int, Tally] = {}
        self._decided: dict[int, Label] = {}
        self._valid = 0  # number of leading prefixes known to be valid
        self._invalid = self.n_open  # index of the first prefix known to be invalid
        self._foregone = Label(True, 1.0) if own_answer else rule.foregone

    def pending(self) -> list[PendingPrefix]:
        """Return the prefixes that need rollouts next; empty at the end of the search."""
        if self.exhaustive:
            prefixes = [k for k in range(self.n_open) if k not in self._decided]
        else:
            candidates = self._candidates()
            prefixes = [candidates[len(candidates) // 2]] if candidates else []
        return [PendingPrefix(k, self._rollouts(k)) for k in prefixes]

    def record(self, prefix: int, tally: Tally) -> None:
        """Record all rollouts so far from a prefix that `pending` requested."""
        self._tallies[prefix] = tally
        label = self.rule.decide(tally)
        if label.valid is None and tally.rollouts < self.rule.limit:
            return
        self._decided[prefix] = label
        if label.valid:
            self._valid = max(self._valid, prefix + 1)
        elif label.valid is False:
            self._invalid = min(self._invalid, prefix)

    def result(self) -> PrefixLabels:
        """Return the labels; raise RuntimeError while rollouts are pending."""
        if pending := self.pending():
            raise RuntimeError(f"rollouts from prefixes {[k for k, _ in pending]} are still missing")
        labels = [self._label(k) for k in range(self.n_open)]
        values = [self._tallies[k].share if k in self._tallies else None for k in range(self.n_open)]
        if self.own_answer is not None:
            labels.append(Label(self.own_answer, 1.0))
            values.append(float(self.own_answer))
        return PrefixLabels([v.valid for v in labels], values, [v.confidence for v in labels])

    def _candidates(self) -> range:
        """Return the range of prefixes that the search still has to divide."""
        if self._foregone:
            return range(0)
        undecided = [k for k, v in self._decided.items() if v.valid is None and self._valid <= k < self._invalid]
        if not undecided:
            return range(self._valid, self._invalid)
        return range(self._valid, min(undecided)) or range(max(undecided) + 1, self._invalid)

    def _rollouts(self, prefix: int) -> int:
        known = self._tallies.get(prefix, Tally(0, 0)).rollouts
        return min(known + self.rule.step, self.rule.limit)

    def _label(self, prefix: int) -> Label:
        if self.exhaustive:
            return self._decided[prefix]
        if self._foregone:
            return self._foregone
        if prefix < self._valid:
            return max(v for k, v in self._decided.items() if v.valid and k >= prefix)
        if prefix >= self._invalid:
            return max(v for k, v in self._decided.items() if v.valid is False and k <= prefix)
        return UNDECIDED
