"""Health checks of servers: at intervals, at once after a failed request, and until a server recovers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context

from parse_infer.backends.pool.circuit import Circuit
from parse_infer.backends.pool.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.pool.discovery import address_of
from parse_infer.backends.servers.dialects.dialect import Dialect
from parse_infer.backends.servers.dialects.registry import DEFAULT

log = logging.getLogger("parse_infer.backends")

CHECK_EVERY_S = 5.0  # while a server is healthy
RETRY_EVERY_S = 0.5  # while a server is unhealthy
CHECK_LIMIT_S = 10.0  # timeout of a check
EXAMINE_LIMIT_S = 60.0  # timeout of an examination; a server's first log-probabilities take seconds
CHECKS_MISSED = 3  # consecutive timeouts that mark a server unhealthy: a busy server may be slow


class Replica:
    """One server.

    Attributes:
        url: without "/v1".
        circuit: whether its requests fail.
        busy: number of our answers and requests on this server.
        requests: number of our requests on this server.
        healthy: whether the server gets requests.
        last_error: why the server is unhealthy, or why its last request failed.
        reads_cache: whether it can judge a draft without reading again what its prefix cache holds.
        dialect: of the server's engine.
        root: source of its model, as first reported.
        examined: whether the server passed `examine` since its last start or recovery.
        recognised_at: when its model was last recognised by a known text (`time.monotonic`).
        waits: timeouts of the requests that wait for this server; they expire when the server becomes unhealthy.
    """

    def __init__(self, url: str, circuit: Circuit | None = None) -> None:
        self.circuit = circuit or Circuit()
        self.url = address_of(url)
        self.busy = self.requests = 0
        self.healthy = True
        self.last_error = ""
        self.reads_cache = False
        self.dialect: Dialect = DEFAULT
        self.root: str | None = None
        self.examined = False
        self.recognised_at = 0.0
        self.waits: set[asyncio.Timeout] = set()
        self.missed = 0
        self.check: asyncio.Task[None] | None = None


class HealthChecks:
    """Updates `Replica.healthy`, in the event loop that runs the requests.

    Args:
        role: "target" or "draft", for messages.
        identify: raises ValueError if a server serves a wrong model.
        examine: checks a new or recovered server thoroughly; raises ValueError likewise.
        report: called with each server that becomes unhealthy.
    """

    def __init__(
        self,
        role: str,
        members: Sequence[Replica],
        client: Client,
        identify: Callable[[Replica], Awaitable[None]],
        examine: Callable[[Replica], Awaitable[None]],
        report: Callable[[Replica], None] = lambda server: None,
    ) -> None:
        self._role, self._members, self._client = role, members, client
        self._identify, self._examine, self._report = identify, examine, report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._leaving: set[Replica] = set()
        self._back = asyncio.Event()

    def start(self) -> None:
        """Start the checks, unless they already run in this event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self.close()
        self._loop, self._back = loop, asyncio.Event()
        for server in self._members:
            server.check = None
            server.waits.clear()
            self.add(server)

    def add(self, server: Replica) -> None:
        """Check a new server, in the event loop of the checks."""
        # In a context of its own: a request may be the cause, but the checks are not its own.
        self._watching[server] = asyncio.get_running_loop().create_task(self._watch(server), context=Context())

    def remove(self, server: Replica) -> None:
        """Stop checking a server once no request waits for it: its machine may vanish before it has answered."""
        if server in self._watching:
            self._leaving.add(server)

    def close(self) -> None:
        """Stop the checks and keep each server's state. `start` restarts them, also in another event loop."""
        for server in list(self._watching):
            self._stop_watching(server)
            if server.check is not None:
                with suppress(RuntimeError):  # its event loop has ended
                    server.check.cancel()
        self._leaving.clear()
        self._loop = None

    async def check(self, server: Replica) -> None:
        """Check a server now. Concurrent calls share one check."""
        await asyncio.shield(self.start_check(server))

    def start_check(self, server: Replica) -> asyncio.Task[None]:
        """Check a server soon, without waiting for the result."""
        if server.check is None or server.check.done():
            server.check = asyncio.get_running_loop().create_task(self._check(server))
        return server.check

    async def wait_for_recovery(self, seconds: float) -> None:
        """Wait until a check finds a healthy server, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._back.wait()

    def mark_unhealthy(self, server: Replica, last_error: str) -> None:
        """Mark a server unhealthy, and end the waits of its requests."""
        server.last_error, server.examined = last_error, False
        if server.healthy:
            server.healthy = False
            self._report(server)
            log.warning("the %s server %s is unhealthy: %s", self._role, server.url, last_error)
            if server in self._watching:  # and has not gone; its task may sleep longer
                self._stop_watching(server)
                self.add(server)
        self.end_waits(server)

    def end_waits(self, server: Replica) -> None:
        """Let the requests that wait for a server fail now."""
        while server.waits:
            wait = server.waits.pop()
            if not wait.expired():  # one that is expiring may not be rescheduled
                wait.reschedule(asyncio.get_running_loop().time())

    def _stop_watching(self, server: Replica) -> None:
        with suppress(RuntimeError):  # its event loop has ended
            self._watching.pop(server).cancel()

    async def _watch(self, server: Replica) -> None:
        while server.requests or server not in self._leaving:
            await asyncio.sleep(CHECK_EVERY_S if server.healthy else RETRY_EVERY_S)
            if server.requests or server not in self._leaving:
                await self.check(server)
        self._leaving.discard(server)
        self._watching.pop(server, None)

    async def _check(self, server: Replica) -> None:
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                await self._identify(server)
                with suppress(RequestRejected):  # the server answers, but has no such path
                    await self._client.text(f"{server.url}/health")
            if not server.examined:
                await examine_within_limit(server, self._examine)
        except TimeoutError:
            server.missed += 1
            if not server.healthy or server.missed >= CHECKS_MISSED:
                self.mark_unhealthy(server, f"{server.url} does not answer a health check within {CHECK_LIMIT_S:g} s")
        except (TransientServerError, ValueError) as error:
            self.mark_unhealthy(server, str(error))
        except Exception as error:  # a check that ended here would leave the server as it is for ever
            log.exception("the health check of the %s server %s failed", self._role, server.url)
            self.mark_unhealthy(server, f"the health check of {server.url} failed: {type(error).__name__}")
        else:
            server.missed = 0
            if not server.healthy:
                server.healthy = True
                server.circuit.close()
                log.info("the %s server %s is healthy again", self._role, server.url)
            self._back.set()
            self._back.clear()


async def examine_within_limit(server: Replica, examine: Callable[[Replica], Awaitable[None]]) -> None:
    """Examine a server. Raises the errors of `examine`, and TransientServerError after `EXAMINE_LIMIT_S`."""
    try:
        async with asyncio.timeout(EXAMINE_LIMIT_S):
            await examine(server)
    except TimeoutError as error:
        raise TransientServerError(
            f"{server.url} does not answer a first request within {EXAMINE_LIMIT_S:g} s"
        ) from error
    server.examined = True
