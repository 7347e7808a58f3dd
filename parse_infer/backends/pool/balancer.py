"""Choice of the replica for each attempt: healthy, with a closed circuit, least busy.

A session stays where its last request was, whose prefix cache has its beginning, unless that replica has `_SLACK`
times its share of the requests. A session that this process does not know goes to the first replica in its own order
of them that has less than its share (rendezvous hashing with bounded loads, arXiv 1608.01350). So several processes
agree, unless a replica is full.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from parse_infer.backends.pool.health import HealthChecks, Replica
from parse_infer.backends.pool.retries import FailedAttempts, Failing, Lease, Unavailable
from parse_infer.backends.pool.sessions import Session

_PULSE_S = 0.5
_SLACK = 2
_REMEMBERED = 1 << 16  # sessions


class Balancer:
    """Chooses among the replicas of one model.

    Args:
        failure: returns why the servers cannot recover; None: they may recover.
        clock: returns seconds.
        choose: chooses among the least busy replicas.
    """

    def __init__(
        self,
        role: str,
        members: Sequence[Replica],
        health: HealthChecks,
        failure: Callable[[], str | None],
        clock: Callable[[], float],
        choose: Callable[[Sequence[Replica]], Replica],
    ) -> None:
        self._role, self._members, self._health, self._failure = role, members, health, failure
        self._clock, self._choose = clock, choose
        self._places: OrderedDict[str, Replica] = OrderedDict()

    def first(self, home: int | None, session: Session | None = None) -> Replica:
        """Return a replica for a new answer: the one with index `home`, modulo their number; None: any."""
        if home is not None:
            return self._members[home % len(self._members)]
        servers = self._usable() or self._members
        if session is None or not session.returns:
            return self._least_busy(servers)
        share = math.ceil((1 + sum(server.busy for server in servers)) / len(servers))
        last = self._places.get(session.id)
        if last is not None and last in servers and last.busy < _SLACK * share:
            return last

        def place(server: Replica) -> bytes:
            return hashlib.blake2b(f"{session.id} {server.url}".encode()).digest()

        return min((server for server in servers if server.busy < share), key=place)

    def remember(self, session: Session, server: Replica) -> None:
        """Note where a request of a session that returns was answered."""
        if not session.returns:
            return
        self._places[session.id] = server
        self._places.move_to_end(session.id)
        if len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)

    async def next(self, lease: Lease | None, tried: FailedAttempts, patience_s: float) -> Replica:
        """Return the replica of the next attempt, one that failed least often.

        Raises Unavailable if no replica takes requests within `patience_s`, or at once for an optional request.
        """
        end = self._clock() + (0.0 if tried.optional else patience_s)
        while not (usable := self._usable(tried)):
            left = end - self._clock()
            if left <= 0 or self._failure() is not None:
                raise self._unavailable(tried)
            rests = (server.circuit.rest_s for server in self._members if server.healthy)
            await self._health.wait_for_recovery(min(left, _PULSE_S, *rests))
        times = min(map(tried.failed.count, usable))
        able = [server for server in usable if tried.failed.count(server) == times]
        if times:
            await asyncio.sleep(tried.back_off_s(times))
        if lease is None:
            return self._least_busy(able)
        if lease.server not in able:
            lease.move(self._least_busy(able))
        return lease.server

    def _usable(self, tried: FailedAttempts | None = None) -> list[Replica]:
        """Healthy replicas whose circuits admit a request; without any, those whose circuits are open.

        An optional request uses no open circuit, and no replica twice.
        """
        healthy = [server for server in self._members if server.healthy]
        admitted = [server for server in healthy if server.circuit.admits]
        if tried is not None and tried.optional:
            return [each for each in admitted if not each.circuit.is_open and each not in tried.failed]
        return admitted or [server for server in healthy if not server.circuit.rest_s]

    def _least_busy(self, servers: Sequence[Replica]) -> Replica:
        """Return one of the least busy servers: always the first would send all traffic to one that fails fast."""
        busy = min(server.busy for server in servers)
        return self._choose([server for server in servers if server.busy == busy])

    def _unavailable(self, tried: FailedAttempts) -> Unavailable:
        if tried.optional and tried.failed:
            return self.failing(tried)
        healthy = [server for server in self._members if server.healthy]
        why = self._failure() or (healthy or self._members)[-1].last_error
        rest_s = min((server.circuit.rest_s for server in healthy), default=0.0)
        return Unavailable(f"no {self._role} server {'takes requests now' if healthy else 'answers'}: {why}", rest_s)

    def failing(self, tried: FailedAttempts) -> Failing:
        """The error of a request whose attempts all failed."""
        return Failing(f"the {self._role} servers failed {len(tried.failed)} times: {tried.last_error}")
