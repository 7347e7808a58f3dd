"""Whether, and when, a request that failed is sent again."""

from __future__ import annotations

import time
from random import random

from openai import APIConnectionError, APIStatusError, APITimeoutError

_NOT_NOW = (429, 502, 503, 504)  # what servers, and balancers in front of them, answer while they start or are full
_TRANSIENT = (408, 409, *_NOT_NOW)
_NOT_REACHED = ("ConnectError", "ConnectTimeout")  # by name: the client's HTTP library differs between its versions
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds, the client's own
_LONGEST_ASKED = 60.0
_GO_ON = "the same command continues where it stopped"


class Patience:
    """With one request. A server that is away is waited for; one that fails at the request is asked a few times more.

    Args:
        retries: failures that are forgiven: an error of the server's, no answer in time, a connection that breaks,
            half an answer.
        max_outage: seconds to wait while servers are away or overloaded.
    """

    def __init__(self, retries: int, max_outage: float) -> None:
        self.retries, self.max_outage = retries, max_outage
        self._attempts = self._failures = 0
        self._away_since: float | None = None

    def wait(self, url: str, error: Exception) -> float:
        """Seconds until the next attempt, after this error of the server at `url`.

        Raises:
            ValueError: the request was refused, or failed too often.
            ConnectionError: servers have been away for too long.
        """
        if is_away(error):
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > self.max_outage:
                raise ConnectionError(
                    f"the server at {url} has been away for more than max_outage, {self.max_outage:g} s "
                    f"({reason(error)}): start it again, and {_GO_ON}"
                ) from None
        elif isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code not in _TRANSIENT:
            raise ValueError(f"the server at {url} refuses a request ({reason(error)}); {_GO_ON}") from None
        else:
            self._failures, self._away_since = self._failures + 1, None
            if self._failures > self.retries:
                raise ValueError(
                    f"the server at {url} failed at the same request {self._failures} times ({reason(error)}): see to "
                    f"it, or raise retries; {_GO_ON}"
                ) from None
        self._attempts += 1
        return max(self._backoff(), min(_asked(error), _LONGEST_ASKED))

    def _backoff(self) -> float:
        """Longer and longer, and not the same for all requests that one fault has hit."""
        return float(min(_FIRST_WAIT * 2.0 ** min(self._attempts - 1, 10), _LONGEST_WAIT) * (1 - 0.25 * random()))


def is_away(error: Exception) -> bool:
    """Whether the server is not there, or overloaded."""
    if isinstance(error, APIStatusError):
        return error.status_code in _NOT_NOW
    return isinstance(error, APIConnectionError) and type(error.__cause__).__name__ in _NOT_REACHED


def reason(error: Exception) -> str:
    """What was wrong, in a few words."""
    if isinstance(error, APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        words = f"{error.status_code} {body.get('message') or body.get('detail') or ''}"
    elif isinstance(error, APITimeoutError) and not is_away(error):
        words = "no answer in time"
    else:
        words = str(error.__cause__ or "") or str(error)
    return " ".join(words.split())[:300].rstrip(" .")


def _asked(error: Exception) -> float:
    """Seconds that the server asks for."""
    header = error.response.headers.get("retry-after", "") if isinstance(error, APIStatusError) else ""
    return float(header) if header.isdecimal() else 0.0
