"""Suggestions for error messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_LISTED = 30
_LONGEST = 100  # characters of a name that are compared


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if none is."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=0.6)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'threshold'?" for a similar name, else the known names, or the number of very many."""
    names = list(known)
    if close := closest(name, names):
        return f"did you mean {close!r}?"
    return (
        f"known: {', '.join(names)}" if len(names) <= MOST_LISTED else f"none of {len(names)} known names is similar"
    )
