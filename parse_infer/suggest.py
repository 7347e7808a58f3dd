"""Suggestions for error messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_LISTED = 30


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'threshold'?" for a similar name, else the known names, or the number of very many."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return (
        f"known: {', '.join(names)}" if len(names) <= MOST_LISTED else f"none of {len(names)} known names is similar"
    )
