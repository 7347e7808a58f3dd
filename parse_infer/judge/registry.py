"""The choice of a judge."""

from __future__ import annotations

from pathlib import Path

from parse_infer.errors import SettingsError
from parse_infer.judge.min_p import check_min_p


def check_one_judge(adapter: str | Path | None, min_p: float | None, zero_shot: bool) -> None:
    """Raise ValueError for more than one judge, or for a `min_p` out of range."""
    given = {"adapter": adapter is not None, "min_p": min_p is not None, "zero_shot": zero_shot}
    if sum(given.values()) > 1:
        names = " and ".join(name for name, is_given in given.items() if is_given)
        raise SettingsError(f"{names} were given: choose one judge")
    if min_p is not None:
        check_min_p(min_p)
