"""Leases and failed attempts of the requests of one answer, and the errors that they end in."""

from __future__ import annotations

from parse_infer.backends.health import Server


class Unavailable(OSError):
    """No server answers."""


class Failing(Unavailable):
    """Servers answer, but this request failed on each attempt."""


class Lease:
    """Binds the requests of one answer to one replica and its prefix cache, and moves them after a failure.

    Attributes:
        patience_s: how long a request waits while no replica is healthy; None: `ReplicaPool.patience_s`.
        cache_salt: of the answer's own prefix cache; None: it shares the server's.
    """

    def __init__(self, server: Server, patience_s: float | None = None) -> None:
        self.server = server
        self.patience_s = patience_s
        self.cache_salt: str | None = None
        server.busy += 1

    def move(self, server: Server) -> None:
        self.server.busy -= 1
        self.server = server
        server.busy += 1


class FailedAttempts:
    """Failed attempts of one request, which has `attempts` in all, but one more at most after a time-out.

    Most likely it would time out again, and each time a server may write the whole answer.

    Attributes:
        failed: the server of each attempt.
        last_error: error of the last attempt.
    """

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts
        self.failed: list[Server] = []
        self.last_error = ""
        self._timed_out = False

    @property
    def left(self) -> int:
        return self.attempts - len(self.failed)

    def record(self, server: Server, last_error: str, timed_out: bool = False) -> None:
        self.failed.append(server)
        self.last_error = server.last_error = last_error
        if timed_out:
            self.attempts = min(self.attempts, len(self.failed) + (not self._timed_out))
            self._timed_out = True
