"""The queue in front of a backend: how many answers may be in it, how long they may take, and how it ends."""

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
    """What one server takes on."""

    waiting: int = 64
    """Answers that may wait while others are written."""
    request_s: float = 600.0
    """A request that is not complete after this many seconds ends with an error."""
    grace_s: float = 30.0
    """After the signal to stop, accepted requests have this many seconds."""
    body_bytes: int = 4 << 20


class AdmissionQueue:
    """Counts the answers that were accepted and have not ended.

    Args:
        parallel: how many of them are written at the same time.
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
        """Within the `async with`, that many answers count.

        Raises ApiError: 429 without room for them, 503 when the server stops, 504 when they take too long.
        """
        if answers > self._capacity:
            raise ApiError(
                400, f"{answers} answers are asked for at once, but this server takes {self._capacity}: ask for less"
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
        """An answer has taken the backend this long."""
        self._seconds.append(seconds)

    def retry_after(self, answers: int = 1) -> int:
        """Seconds until there should be room, from what the last answers took; at least 1."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, math.ceil(mean * (self.answers + answers - self._capacity) / self._parallel))

    def close(self) -> None:
        """Accept nothing more; what was accepted goes on."""
        self.closing = True

    def abort(self) -> None:
        """End with an error whatever is still there."""
        self.closing = True
        for clock in self._clocks:
            clock.reschedule(asyncio.get_running_loop().time())

    def _stopping(self) -> ApiError:
        return ApiError(503, "the server is stopping", "stopping", headers={"Retry-After": "5"})
