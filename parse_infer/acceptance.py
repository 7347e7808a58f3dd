"""Which prefix of a draft is kept, given the validity at each cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal, get_args

Acceptance = Literal["first_failure", "longest"]
ACCEPT_NOTHING = 1 + 2.0**-20
"""A threshold above every validity, in float32 too."""


def maximal_valid_prefix(validity: Sequence[float], threshold: float, rule: Acceptance = "first_failure") -> int:
    """Number of accepted cuts, 0..K (0: nothing is kept). A cut passes when its validity is at least `threshold`.

    Args:
        validity: estimated validity at each of the K cuts, in order.
        threshold: see `check_threshold`.
        rule: "first_failure" keeps everything before the first cut that fails; "longest" keeps everything up to the
            last cut that passes, whatever lies before it (PARSE, arXiv 2605.04263: maximal valid prefix).

    Raises:
        ValueError: an unknown rule or a threshold out of range.
    """
    check_threshold(threshold)
    passes = [v >= threshold for v in validity]  # NaN passes nothing
    if rule == "first_failure":
        return passes.index(False) if False in passes else len(passes)
    if rule == "longest":
        return max((k + 1 for k, ok in enumerate(passes) if ok), default=0)
    raise ValueError(f"unknown acceptance rule {rule!r}: choose one of {', '.join(get_args(Acceptance))}")


def reachable_prefixes(validity: Sequence[float], rule: Acceptance = "first_failure") -> list[int]:
    """The numbers of cuts that `maximal_valid_prefix` returns for some threshold, in order.

    A cut can be the last accepted one where the next one is worse than all before it ("first_failure"), or where it is
    better than all behind it ("longest"). NaN passes no threshold; for it a number too many may be listed.
    """
    k = len(validity)
    if rule == "first_failure":
        lowest, found = math.inf, []
        for i, value in enumerate(validity):
            if not value >= lowest:
                found.append(i)
                lowest = value
        return [*found, k]
    highest, found = -math.inf, []
    for i in range(k, 0, -1):
        if not validity[i - 1] <= highest:
            found.append(i)
            highest = validity[i - 1]
    return [0, *reversed(found)]


def check_threshold(threshold: float) -> float:
    """Return the threshold if it is a finite number of at least 0. Above 1 it accepts nothing, which is allowed.

    Raises:
        ValueError: anything else.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise ValueError(f"the threshold must be a number, not {threshold!r}")
    if not math.isfinite(threshold) or threshold < 0:
        raise ValueError(
            f"the threshold must be a finite number of at least 0 (above 1 accepts nothing), not {threshold}"
        )
    return float(threshold)


def check_share(value: float, name: str) -> float:
    """Return `value` if it is a number between 0 and 1, both excluded; else a ValueError that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a number between 0 and 1, such as 0.05")
    return float(value)
