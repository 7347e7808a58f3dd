"""From values of prefixes to labels, asking for as few values as possible.

The value of a prefix is the share of target rollouts from it that end right. A prefix is valid if it has not lowered
the target's chance: `value >= target_value - margin`, where `target_value` is the value of the bare prompt. Two cases
need no rollout: the last prefix of a finished draft is judged by its own answer, and a draft whose answer is right is
valid throughout. In any other draft the first error is found by binary search, as in OmegaPRM (Luo et al. 2024,
arXiv 2406.06592): prefixes before a valid one count as valid, prefixes after an invalid one as invalid.
"""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-9  # shares are sums and quotients of small integers


@dataclass(frozen=True)
class PrefixLabels:
    """One label for each of the K prefixes; the value too where it is known, None where the label was inferred."""

    labels: list[bool]
    values: list[float | None]


class PrefixSearch:
    """Labels the K prefixes of one draft: `pending()` names those whose value is needed, `record()` takes it.

    Args:
        n_prefixes: K, at least 1.
        target_value: value of the bare prompt.
        own_answer: whether the draft's answer is right; None for a draft that is not finished, which has none.
        margin: a value may lie below `target_value` by this much and still count as valid.
        exhaustive: ask for the value of every prefix (the last one of a finished draft has one without rollouts).

    Attributes:
        n_open: prefixes that may need a value: all but one that its own answer decides.
    """

    def __init__(
        self,
        n_prefixes: int,
        target_value: float,
        own_answer: bool | None,
        margin: float = 0.0,
        exhaustive: bool = False,
    ) -> None:
        if n_prefixes < 1:
            raise ValueError("a draft without a prefix has nothing to label")
        self.threshold = target_value - margin
        self.own_answer = own_answer
        self.exhaustive = exhaustive
        self._values: list[float | None] = [None] * n_prefixes
        self.n_open = n_prefixes
        if own_answer is not None:
            self._values[-1] = float(own_answer)
            self.n_open -= 1
        self._valid = 0  # prefixes known to be valid, counted from the start
        self._invalid = self.n_open  # index of the first prefix known to be invalid
        if own_answer or self.threshold <= _ROUNDING:  # no value can lie below a chance of zero
            self._valid = self.n_open

    def pending(self) -> list[int]:
        """Indices of the prefixes whose values are needed next; empty when the labels are known."""
        if self.exhaustive:
            return [k for k in range(self.n_open) if self._values[k] is None]
        return [(self._valid + self._invalid) // 2] if self._valid < self._invalid else []

    def record(self, prefix: int, value: float) -> None:
        """Take the value of a prefix that `pending` has named."""
        self._values[prefix] = value
        if self._holds(value):
            self._valid = max(self._valid, prefix + 1)
        else:
            self._invalid = min(self._invalid, prefix)

    def result(self) -> PrefixLabels:
        """The labels, once nothing is pending."""
        if self.pending():
            raise RuntimeError(f"values of prefixes {self.pending()} are still missing")
        if self.exhaustive:
            labels = [self._holds(value) for value in self._values[: self.n_open] if value is not None]
        else:
            labels = [k < self._valid for k in range(self.n_open)]
        if self.own_answer is not None:
            labels.append(self.own_answer)
        return PrefixLabels(labels, list(self._values))

    def _holds(self, value: float) -> bool:
        return value >= self.threshold - _ROUNDING
