"""Leases and failed attempts of the requests of one answer, and the errors that they end in."""

from __future__ import annotations

from parse_infer.backends.pool.circuit import Begun
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.origin import SESSION_ID
from parse_infer.backends.pool.sessions import Session

TRIAL_SILENCE_S = 2.0
_LONGEST_BACK_OFF_S = 30.0


class Unavailable(OSError):
    """No server answers.

    Attributes:
        retry_after_s: how long the servers asked for no requests; 0: they did not.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Failing(Unavailable):
    """Servers answer, but this request failed on each attempt."""


class Lease:
    """Binds the requests of one answer to one replica and its prefix cache, and moves them after a failure.

    Attributes:
        optional: the answer can do without these requests, so they wait for no server, and each gets one try.
        session: of the answer; None: it has none.
        cache_salt: of the answer's own prefix cache; None: it shares the server's.
    """

    def __init__(self, server: Replica, optional: bool = False, session: Session | None = None) -> None:
        self.server = server
        self.optional = optional
        self.session = session
        self.cache_salt: str | None = None
        server.busy += 1

    def move(self, server: Replica) -> None:
        self.server.busy -= 1
        self.server = server
        server.busy += 1


def headers_of(lease: Lease | None) -> dict[str, str]:
    """Headers of an answer's requests, by which a router in front of the servers can keep a session together."""
    return {} if lease is None or lease.session is None else {SESSION_ID: lease.session.id}


class Attempt:
    """One attempt of a request at one server.

    Attributes:
        optional: see `Lease`.
        begun: state of the server's circuit at the beginning.
        begun_at: time of the beginning, by the pool's clock.
        answered: the server has sent a piece of its stream.
        ended: its outcome is counted.
    """

    def __init__(self, server: Replica, optional: bool, begun_at: float) -> None:
        self.server, self.optional, self.begun_at = server, optional, begun_at
        self.begun = server.circuit.begin()
        self.answered = self.ended = False

    def limit_s(self, silence_s: float | None) -> float | None:
        """How long the server may send nothing; a trial of a server that failed before is short."""
        return min(silence_s, TRIAL_SILENCE_S) if silence_s is not None and self.begun is Begun.TRIAL else silence_s


class FailedAttempts:
    """Failed attempts of one request, which has `attempts` in all, but one more at most after a time-out.

    Most likely it would time out again, and each time a server may write the whole answer. An optional request has
    one attempt per server, and none after a time-out.

    Args:
        repeatable: carrying the request out twice does no harm; else there is no attempt after one that a server may
            have carried out.

    Attributes:
        failed: the server of each attempt.
        last_error: error of the last attempt.
    """

    def __init__(
        self, attempts: int, back_off_s: float = 0.0, optional: bool = False, repeatable: bool = True
    ) -> None:
        self.attempts, self.optional, self._repeatable = attempts, optional, repeatable
        self._back_off_s = back_off_s
        self.failed: list[Replica] = []
        self.last_error = ""
        self._timed_out = False

    @property
    def left(self) -> int:
        return self.attempts - len(self.failed)

    def back_off_s(self, times: int) -> float:
        """Seconds to wait after a replica has failed `times` times."""
        return min(self._back_off_s * 2.0 ** min(times - 1, 30), _LONGEST_BACK_OFF_S)

    def record(self, server: Replica, last_error: str, timed_out: bool = False, unread: bool = True) -> None:
        self.failed.append(server)
        self.last_error = server.last_error = last_error
        if not (self._repeatable or unread):
            self.attempts = len(self.failed)
        if timed_out:
            again = not (self._timed_out or self.optional)
            self.attempts = min(self.attempts, len(self.failed) + again)
            self._timed_out = True
