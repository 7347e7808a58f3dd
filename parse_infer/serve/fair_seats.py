"""Weighted fair queueing: seats for concurrent answers, shared among clients by weight."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from parse_infer.serve.api_keys import Caller


class FairSeats:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) of `number` seats.

    While several clients wait, a client with twice the weight is seated twice as often. A client alone gets all seats,
    and nobody saves up seats while idle.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._now = 0.0  # virtual time: the start of the answer that was seated last
        self._next: dict[Caller, float] = {}  # earliest virtual start of each client's next answer
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def seat(self, caller: Caller, answers: int = 1) -> AsyncIterator[None]:
        """Hold a seat within the `async with`. It counts as `answers` of the client's answers."""
        start = max(self._now, self._next.get(caller, 0.0))
        self._next[caller] = start + answers / caller.weight
        place = (start, next(self._arrivals), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, place)
        self._fill()
        try:
            await place[-1]
            yield
        finally:
            if place[-1].done() and not place[-1].cancelled():
                self._free += 1
                self._fill()
            else:  # the client left before it was seated, and pays for nothing
                self._next[caller] -= answers / caller.weight

    def _fill(self) -> None:
        while self._waiting and (self._free or self._waiting[0][-1].done()):
            start, _, seated = heapq.heappop(self._waiting)
            if not seated.done():
                self._free, self._now = self._free - 1, max(self._now, start)
                seated.set_result(None)
