"""Retry policy of failed requests."""

from __future__ import annotations

import time
from random import random

from openai import APIConnectionError, APIStatusError, APITimeoutError

from parse_infer.errors import ParseError

_NOT_NOW = (429, 502, 503, 504)  # from servers and load balancers during a start or overload
_TRANSIENT = (408, 409, *_NOT_NOW)
_NOT_REACHED = ("ConnectError", "ConnectTimeout")  # by name: versions of the client use different HTTP libraries
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds, as in the openai client
_LONGEST_RETRY_AFTER = 60.0  # seconds
_RESUME_HINT = "the same command continues where it stopped"


class RetryPolicy:
    """Retry state of one request: waits for unavailable servers, and retries a failed request `retries` times.

    Args:
        retries: retries after a server error, a timeout, a broken connection or an incomplete answer.
        max_outage: seconds to wait while servers are unavailable or overloaded.
    """

    def __init__(self, retries: int, max_outage: float) -> None:
        self.retries, self.max_outage = retries, max_outage
        self._attempts = self._failures = 0
        self._away_since: float | None = None

    def wait(self, url: str, error: Exception) -> float:
        """Return the seconds until the next attempt, after this error of the server at `url`.

        Raises:
            ValueError: the server rejected the request, or the request failed too often.
            ConnectionError: the servers have been unavailable for more than `max_outage` seconds.
        """
        if is_away(error):
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > self.max_outage:
                raise ConnectionError(
                    f"the server at {url} has been unavailable for more than max_outage, {self.max_outage:g} s "
                    f"({reason(error)}): restart the server; {_RESUME_HINT}"
                ) from None
        elif isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code not in _TRANSIENT:
            raise ParseError(f"the server at {url} rejects a request ({reason(error)}); {_RESUME_HINT}") from None
        else:
            self._failures, self._away_since = self._failures + 1, None
            if self._failures > self.retries:
                raise ParseError(
                    f"the server at {url} failed the same request {self._failures} times ({reason(error)}): repair "
                    f"the server, or raise retries; {_RESUME_HINT}"
                ) from None
        self._attempts += 1
        return max(self._backoff(), min(_retry_after(error), _LONGEST_RETRY_AFTER))

    def _backoff(self) -> float:
        """Return the exponential backoff with jitter, in seconds."""
        return float(min(_FIRST_WAIT * 2.0 ** min(self._attempts - 1, 10), _LONGEST_WAIT) * (1 - 0.25 * random()))


def is_away(error: Exception) -> bool:
    """Whether the server is unreachable or overloaded."""
    if isinstance(error, APIStatusError):
        return error.status_code in _NOT_NOW
    return isinstance(error, APIConnectionError) and type(error.__cause__).__name__ in _NOT_REACHED


def reason(error: Exception) -> str:
    """Describe the error in at most 300 characters."""
    if isinstance(error, APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        words = f"{error.status_code} {body.get('message') or body.get('detail') or ''}"
    elif isinstance(error, APITimeoutError) and not is_away(error):
        words = "no answer in time"
    else:
        words = str(error.__cause__ or "") or str(error)
    return " ".join(words.split())[:300].rstrip(" .")


def _retry_after(error: Exception) -> float:
    """Return the seconds in the response's Retry-After header, or 0."""
    header = error.response.headers.get("retry-after", "") if isinstance(error, APIStatusError) else ""
    return float(header) if header.isdecimal() else 0.0
