"""Suggestions for error messages about unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MOST_LISTED = 30
_LONGEST = 100  # characters of a name that are compared
_MISSPELT, _SIMILAR = 0.75, 0.6  # least similarity, of 1


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if none is.

    A known name that is a word of the name comes before a vaguely similar one: "dtype" for "torch_dtype".
    """
    name, names = name[:_LONGEST], list(known)
    words = re.split(r"\W|_", name)
    for candidates, cutoff in (
        (names, _MISSPELT),
        ([each for each in names if len(each) > 2 and each in words], 0.0),
        (names, _SIMILAR if len(name) > 4 else _MISSPELT),  # "data" is not "draft"
    ):
        if close := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return close[0]
    return None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'threshold'?" for a similar name, else the known names, or the number of very many."""
    names = list(known)
    if close := closest(name, names):
        return f"did you mean {close!r}?"
    return (
        f"known: {', '.join(names)}" if len(names) <= MOST_LISTED else f"none of {len(names)} known names is similar"
    )
