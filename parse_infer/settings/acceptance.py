"""Acceptance rules: choose the prefix of a draft to keep, given the validity at each cut."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Literal, get_args

from parse_infer.errors import SettingsError

Acceptance = Literal["first_failure", "longest"]
_HIGHEST = sys.float_info.max
ACCEPT_NOTHING = 1 + 2.0**-20
"""A threshold above every validity, in float32 too."""


def maximal_valid_prefix(validity: Sequence[float], threshold: float, rule: Acceptance = "first_failure") -> int:
    """Return the number of accepted cuts, 0..K. A cut passes if its validity is at least `threshold`.

    Args:
        validity: estimated validity at each of the K cuts, in order.
        threshold: see `check_threshold`.
        rule: "first_failure" accepts the cuts before the first cut that fails. "longest" accepts all cuts up to the
            last cut that passes (PARSE, arXiv 2605.04263: maximal valid prefix).

    Raises:
        ValueError: an unknown rule or a threshold out of range.
    """
    check_threshold(threshold)
    passes = [v >= threshold for v in validity]  # NaN never passes
    if rule == "first_failure":
        return passes.index(False) if False in passes else len(passes)
    if rule == "longest":
        return max((k + 1 for k, ok in enumerate(passes) if ok), default=0)
    raise SettingsError(f"unknown acceptance rule {rule!r}: choose one of {', '.join(get_args(Acceptance))}")


def reachable_prefixes(validity: Sequence[float], rule: Acceptance = "first_failure") -> list[int]:
    """Return all numbers of cuts that `maximal_valid_prefix` returns for some threshold, in order.

    With "first_failure" a cut can be the last accepted cut if the next cut is worse than all cuts before it. With
    "longest" the cut must be better than all later cuts. NaN validities may add unreachable numbers to the list.
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
    """Return the threshold if it is a finite number of at least 0. A threshold above 1 accepts no prefix.

    Raises:
        ValueError: any other value.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise SettingsError(f"the threshold must be a number, not {threshold!r}")
    if not 0 <= threshold <= _HIGHEST:  # NaN is not
        raise SettingsError(
            f"the threshold must be a finite number of at least 0 (above 1 accepts nothing), not {threshold}"
        )
    return float(threshold)


def describe_threshold(threshold: float | None) -> str:
    """Return a threshold in words: a number, "accepts nothing" or "none"."""
    if threshold is None:
        return "none"
    return "accepts nothing" if threshold > 1 else f"{threshold:.4g}"


def check_share(value: float, name: str) -> float:
    """Return `value` if it is a number between 0 and 1, both excluded. Otherwise raise a ValueError about `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise SettingsError(f"{name} is {value!r}; it must be a number between 0 and 1, such as 0.05")
    return float(value)
