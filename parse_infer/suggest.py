"""Suggestions for error messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'threshold'?" for a similar or one of many known names, else "known: a, b, c"."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6 if len(names) <= 20 else 0.0)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
