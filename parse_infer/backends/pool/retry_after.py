"""The header `Retry-After` (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

LONGEST_S = 60.0
_SECONDS = re.compile(r"\d+(\.\d*)?", re.ASCII)


def read_retry_after(value: str | None, now: float) -> float | None:
    """Return how many seconds to wait, at most `LONGEST_S`; None without a valid value.

    Args:
        value: seconds or an HTTP date.
        now: seconds since 1970.
    """
    if value is None:
        return None
    if _SECONDS.fullmatch(value.strip()):
        return min(float(value), LONGEST_S)
    try:
        date = parsedate_to_datetime(value)
        seconds = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), LONGEST_S)
