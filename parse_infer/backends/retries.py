"""The requests of one answer: where they go, what has failed of them, and how they end in an error."""

from __future__ import annotations

from parse_infer.backends.health import Server

ATTEMPTS = 4  # of one request


class Unavailable(OSError):
    """No server answers."""


class Failing(Unavailable):
    """Servers answer, but none of them answers this request."""


class Replaced(ValueError):
    """Servers answer, but none of them runs the adapter that drafts are judged with."""


class Lease:
    """Where the requests of one answer go: to one server, which keeps what it has read; after a failure to another.

    Attributes:
        patience_s: how long a request waits while no server is well; None: as long as any (`ReplicaPool.patience_s`).
    """

    def __init__(self, server: Server, patience_s: float | None = None) -> None:
        self.server = server
        self.patience_s = patience_s
        server.busy += 1

    def move(self, server: Server) -> None:
        self.server.busy -= 1
        self.server = server
        server.busy += 1


class Attempts:
    """Those of one request that have failed.

    Attributes:
        failed: the server of each.
        trouble: why the last one did.
    """

    def __init__(self) -> None:
        self.failed: list[Server] = []
        self.last_error = ""

    @property
    def left(self) -> int:
        return ATTEMPTS - len(self.failed)

    def note(self, server: Server, last_error: str) -> None:
        self.failed.append(server)
        self.last_error = server.last_error = last_error
