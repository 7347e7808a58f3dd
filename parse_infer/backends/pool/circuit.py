"""Circuit breaker of one server: while its requests fail it gets none, whatever its health check says."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

FAILURES = 5  # more failures than successes, after which a circuit opens
PAUSE_S = 1.0  # of the first opening; doubles with each further one
LONGEST_PAUSE_S = 60.0


class Begun(Enum):
    """State of the circuit when a request began."""

    CLOSED = "closed"
    TRIAL = "trial"  # the one request that decides whether an open circuit closes
    LAST_RESORT = "last resort"  # the circuit is open, but no other server is left


class Circuit:
    """Decides from the outcomes of requests whether a server gets more of them.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = self._openings = 0
        self._open_until: float | None = None
        self._rests_until = clock()
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    @property
    def pause_s(self) -> float:
        """Seconds until an open circuit admits a trial."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    @property
    def rest_s(self) -> float:
        """Seconds for which the server asked for no requests (`Retry-After`)."""
        return max(0.0, self._rests_until - self._clock())

    @property
    def admits(self) -> bool:
        """Whether the server may get a request now."""
        return not self.rest_s and not (self.is_open and (self.pause_s or self._on_trial))

    def begin(self) -> Begun:
        """Note that a request begins. `succeed`, `fail` or `leave` must follow."""
        if not self.is_open:
            return Begun.CLOSED
        if not self.admits:
            return Begun.LAST_RESORT
        self._on_trial = True
        return Begun.TRIAL

    def leave(self, begun: Begun) -> None:
        """Note that a request ended without a verdict, as when its client left."""
        if begun is Begun.TRIAL:
            self._on_trial = False

    def succeed(self, begun: Begun) -> None:
        """Note a success. It closes a circuit that was open when the request began."""
        self.leave(begun)
        if begun is not Begun.CLOSED:
            self.close()
        elif not self.is_open:
            self._failures = max(0, self._failures - 1)
            self._openings = max(0, self._openings - 1)

    def fail(self, begun: Begun, limit: int = FAILURES, rest_s: float | None = None) -> bool:
        """Note a failure; return whether it opens the circuit. An open one ignores requests that began before.

        Args:
            limit: failures beyond the successes that open the circuit. A trial's failure opens it at once.
            rest_s: how long the server asks for no requests.
        """
        self.leave(begun)
        if rest_s is not None:
            self._rests_until = max(self._rests_until, self._clock() + rest_s)
        if begun is Begun.LAST_RESORT or (begun is Begun.CLOSED and self.is_open):
            return False
        self._failures += 1
        if begun is Begun.CLOSED and self._failures < limit:
            return False
        pause_s = min(PAUSE_S * 2.0 ** min(self._openings, 30), LONGEST_PAUSE_S)
        self._open_until = self._clock() + pause_s
        self._openings, self._failures = self._openings + 1, 0
        return True

    def close(self) -> None:
        """Let the server have requests again. The next pauses shorten only with further successes."""
        self._open_until, self._failures, self._on_trial = None, 0, False
