"""Admission queue of a runner: capacity, time limit and shutdown."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from parse_infer.serve.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    waiting: int = 64
    """Largest number of queued answers."""
    request_s: float = 600.0
    """Timeout of a request in seconds."""
    grace_s: float = 30.0
    """Seconds that accepted requests have after a stop signal."""
    body_bytes: int = 4 << 20
    send_s: float = 60.0
    """Seconds in which a client must send a whole request."""


class AdmissionQueue:
    """Counts the accepted, unfinished answers.

    Args:
        parallel: number of answers that the runner writes concurrently.
    """

    def __init__(self, limits: Limits, parallel: int) -> None:
        self.answers = 0
        self.closing = False
        self._limits = limits
        self._parallel = parallel
        self._capacity = limits.waiting + parallel
        self._seconds: deque[float] = deque(maxlen=32)  # of the last answers
        self._clocks: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def place(self, answers: int) -> AsyncIterator[None]:
        """Count this many answers as accepted within the `async with`.

        Raises ApiError: 429 if the queue is full, 503 if the server stops, 504 after the time limit.
        """
        if answers > self._capacity:
            raise ApiError(
                400,
                f"the request needs {answers} answers, but this server takes at most {self._capacity}: ask for less",
            )
        if self.closing:
            raise self._stopping()
        if self.answers + answers > self._capacity:
            seconds = str(self.retry_after(answers))
            raise ApiError(
                429,
                f"the queue is full ({self.answers} answers): try again in {seconds} s",
                "queue_full",
                headers={"Retry-After": seconds},
            )
        self.answers += answers
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
            self.answers -= answers

    def note(self, seconds: float) -> None:
        """Record the time of one answer."""
        self._seconds.append(seconds)

    def retry_after(self, answers: int = 1) -> int:
        """Estimate the seconds until the queue has room, from the times of the last answers; at least 1."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, math.ceil(mean * (self.answers + answers - self._capacity) / self._parallel))

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
