"""Has a promise become implausible? A test that may be looked at after every observation.

The likelihood ratio of a larger rate to the largest promised one is, on average, never above 1 as long as the promise
holds; so is a mean of such ratios. That it ever reaches 1 / level has a probability of at most `level` then (Ville's
inequality; Ramdas et al., arXiv 2210.01948): looking often does no harm.
"""

from __future__ import annotations

import math

from parse_infer.acceptance import check_share

_ALTERNATIVES = 8  # larger rates, half as far from 1 each time


class DriftTest:
    """Tests "an event happens at most at this rate", one observation after the other.

    Args:
        rate: the largest that is promised.
        level: how likely a false alarm may be, ever.
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
        """Stays True, once it is."""

    @property
    def evidence(self) -> float:
        """Against the promise; starts at 1, and from 1 / level on the promise is implausible."""
        largest = max(self._logs)
        total = sum(math.exp(value - largest) for value in self._logs)
        return math.exp(min(700.0, largest + math.log(total / len(self._logs))))

    def see(self, happened: bool) -> None:
        self.observations += 1
        self.events += happened
        steps = self._happened if happened else self._not
        self._logs = [value + step for value, step in zip(self._logs, steps, strict=True)]
        self.implausible = self.implausible or self.evidence >= self._limit
