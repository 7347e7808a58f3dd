"""Sequential test of a risk promise, valid after every observation.

While the promise holds, the likelihood ratio of a larger rate to the promised rate has a mean of at most 1. So does a
mean of such ratios. Such a mean ever reaches 1 / level with a probability of at most `level` (Ville's inequality;
Ramdas et al., arXiv 2210.01948), so frequent looks do no harm.
"""

from __future__ import annotations

import math

from parse_infer.acceptance import check_share

_ALTERNATIVES = 8  # larger rates; each halves the distance to 1


class DriftTest:
    """Tests "an event has at most this rate", one observation at a time.

    Args:
        rate: the promised upper bound.
        level: probability of a false alarm over all observations.
    """

    def __init__(self, rate: float, level: float) -> None:
        check_share(rate, "rate")
        check_share(level, "level")
        larger = [1 - (1 - rate) * (1 - 0.5**k) for k in range(1, _ALTERNATIVES + 1)]
        self._happened = [math.log(other / rate) for other in larger]
        self._not = [math.log((1 - other) / (1 - rate)) for other in larger]
        self._logs = [0.0] * len(larger)
        self._limit = 1 / level
        self.observations = 0
        self.events = 0
        self.implausible = False
        """Whether the test has rejected the promise; never reset."""

    @property
    def evidence(self) -> float:
        """Evidence against the promise: 1 at the start; from 1 / level the promise is implausible."""
        largest = max(self._logs)
        total = sum(math.exp(value - largest) for value in self._logs)
        return math.exp(min(700.0, largest + math.log(total / len(self._logs))))

    def see(self, happened: bool) -> None:
        self.observations += 1
        self.events += happened
        steps = self._happened if happened else self._not
        self._logs = [value + step for value, step in zip(self._logs, steps, strict=True)]
        self.implausible = self.implausible or self.evidence >= self._limit
