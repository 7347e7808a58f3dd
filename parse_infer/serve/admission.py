"""Admission of requests: capacity, fair seats, time limit and shutdown."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from parse_infer.serve.api_keys import Caller, caller
from parse_infer.serve.errors import ApiError
from parse_infer.serve.fair_seats import FairSeats


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    waiting: int = 64
    """Largest number of queued answers of a client."""
    request_s: float = 600.0
    """Timeout of a request in seconds."""
    grace_s: float = 30.0
    """Seconds that accepted requests have after a stop signal."""
    body_bytes: int = 4 << 20
    send_s: float = 60.0
    """Seconds in which a client must send a whole request."""


class AdmissionQueue:
    """Counts the accepted, unfinished answers of each client, and seats them.

    Requests that are passed through have a queue of their own (`relayed`), so that neither kind can fill the other's
    seats. The client is that of the current request.

    Args:
        parallel: number of answers that the runner writes concurrently.
    """

    def __init__(self, limits: Limits, parallel: int) -> None:
        self.closing = False
        self._limits = limits
        self._parallel = parallel
        self._capacity = limits.waiting + parallel  # of each client
        self._accepted: dict[bool, Counter[Caller]] = {relayed: Counter() for relayed in (False, True)}
        self._seats = {relayed: FairSeats(parallel) for relayed in (False, True)}
        self._seconds: deque[float] = deque(maxlen=32)  # of the last answers
        self._clocks: set[asyncio.Timeout] = set()

    @property
    def answers(self) -> int:
        return sum(accepted.total() for accepted in self._accepted.values())

    @asynccontextmanager
    async def place(self, answers: int, relayed: bool = False) -> AsyncIterator[None]:
        """Count this many answers as accepted within the `async with`.

        Raises ApiError: 429 if the client's queue is full, 503 if the server stops, 504 after the time limit.
        """
        client, accepted = caller.get(), self._accepted[relayed]
        if answers > self._capacity:
            raise ApiError(
                400,
                f"the request needs {answers} answers, but this server takes at most {self._capacity}: ask for less",
            )
        if self.closing:
            raise self._stopping()
        if accepted[client] + answers > self._capacity:
            seconds = str(self._retry_after(client, answers, relayed))
            raise ApiError(
                429,
                f"the queue is full ({accepted[client]} answers): try again in {seconds} s",
                "queue_full",
                headers={"Retry-After": seconds},
            )
        accepted[client] += answers
        try:
            async with asyncio.timeout(self._limits.request_s) as clock:
                self._clocks.add(clock)
                try:
                    yield
                finally:
                    self._clocks.discard(clock)
        except TimeoutError as error:
            if not clock.expired():
                raise
            if self.closing:
                raise self._stopping() from error
            raise ApiError(504, f"the request took more than {self._limits.request_s:g} s", "timeout") from error
        finally:
            accepted[client] -= answers
            if not accepted[client]:
                del accepted[client]

    def seat(self, answers: int = 1, relayed: bool = False) -> AbstractAsyncContextManager[None]:
        """Wait for a seat, by weighted fair queueing among clients, and hold it within the `async with`."""
        return self._seats[relayed].seat(caller.get(), answers)

    def note(self, seconds: float) -> None:
        """Record the time of one answer."""
        self._seconds.append(seconds)

    def retry_after(self) -> int:
        """Estimate the seconds until each client's queue has room, from the times of the last answers; at least 1."""
        return max((self._retry_after(client, 1, False) for client in self._accepted[False]), default=1)

    def _retry_after(self, client: Caller, answers: int, relayed: bool) -> int:
        accepted = self._accepted[relayed]
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        seats = self._parallel * client.weight / sum(other.weight for other in {client, *accepted})
        return max(1, math.ceil(mean * (accepted[client] + answers - self._capacity) / seats))

    def close(self) -> None:
        """Stop admission; accepted answers continue."""
        self.closing = True

    def abort(self) -> None:
        """End all accepted answers with an error."""
        self.closing = True
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(asyncio.get_running_loop().time())

    def _stopping(self) -> ApiError:
        return ApiError(503, "the server is stopping", "stopping", headers={"Retry-After": "5"})
