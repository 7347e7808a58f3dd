"""Health checks of servers: at intervals, at once after a failed request, and until a lost server is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from parse_infer.backends.client import Client, RequestRejected, TransientServerError

log = logging.getLogger("parse_infer.backends")

CHECK_EVERY_S = 5.0  # while a server is well
RETRY_EVERY_S = 0.5  # while it is not
CHECK_LIMIT_S = 10.0  # for the answers to one check
EXAMINE_LIMIT_S = 60.0  # for a close look; the first log-probabilities of a server take seconds
CHECKS_MISSED = 3  # checks in a row without an answer in time that take a server out: a busy one may be slow


class Server:
    """One server.

    Attributes:
        url: without "/v1".
        busy: answers and requests that it works on for us.
        well: whether requests may go to it.
        trouble: why not, or why its last request failed.
        judges: whether it runs the adapter that drafts are judged with.
        root: what it loaded its model from, as it said first.
        examined: whether it was looked at closely since it came, or came back.
        waits: limits of the requests that wait for it; moved to now when it is lost.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.busy = 0
        self.healthy = True
        self.last_error = ""
        self.judges = True
        self.root: str | None = None
        self.examined = False
        self.waits: set[asyncio.Timeout] = set()
        self.missed = 0
        self.check: asyncio.Task[None] | None = None


class HealthChecks:
    """Keeps `Server.well` true to the facts, in the event loop that runs the requests.

    Args:
        role: for messages: "target" or "draft".
        identify: asks a server what it serves; ValueError where that is not what it should be.
        examine: looks closely at a server that has come, or has come back; ValueError likewise.
    """

    def __init__(
        self,
        role: str,
        members: Sequence[Server],
        client: Client,
        identify: Callable[[Server], Awaitable[None]],
        examine: Callable[[Server], Awaitable[None]],
    ) -> None:
        self._role, self._members, self._client = role, members, client
        self._identify, self._examine = identify, examine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: dict[Server, asyncio.Task[None]] = {}
        self._back = asyncio.Event()

    def start(self) -> None:
        """Begin, unless checks already run in this event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self.close()
        self._loop, self._back = loop, asyncio.Event()
        for server in self._members:
            server.check = None
            server.waits.clear()
            self._watching[server] = loop.create_task(self._watch(server))

    def close(self) -> None:
        """End the checks. Servers stay as they are; `start` begins again, also in another event loop."""
        for server in list(self._watching):
            self._stop_watching(server)
        self._loop = None

    async def check(self, server: Server) -> None:
        """Check a server now. Requests that fail together share one check."""
        if server.check is None or server.check.done():
            server.check = asyncio.get_running_loop().create_task(self._check(server))
        await asyncio.shield(server.check)

    async def change(self, seconds: float) -> None:
        """Wait until a server is back, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._back.wait()

    def lose(self, server: Server, last_error: str) -> None:
        """Take a server out, and end the waits of its requests."""
        server.last_error, server.examined = last_error, False
        if server.healthy:
            server.healthy = False
            log.warning("the %s server %s is out: %s", self._role, server.url, last_error)
            self._stop_watching(server)  # which may be asleep for longer
            self._watching[server] = asyncio.get_running_loop().create_task(self._watch(server))
        while server.waits:
            server.waits.pop().reschedule(asyncio.get_running_loop().time())

    def _stop_watching(self, server: Server) -> None:
        with suppress(RuntimeError):  # its event loop has ended
            self._watching.pop(server).cancel()

    async def _watch(self, server: Server) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S if server.healthy else RETRY_EVERY_S)
            await self.check(server)

    async def _check(self, server: Server) -> None:
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                await self._identify(server)
                with suppress(RequestRejected):  # there is no such path, but there is a server
                    await self._client.get(f"{server.url}/health")
            if not server.examined:
                await self._look_closely(server)
        except TimeoutError:
            server.missed += 1
            if not server.healthy or server.missed >= CHECKS_MISSED:
                self.lose(server, f"{server.url} does not tell its health within {CHECK_LIMIT_S:g} s")
        except (TransientServerError, ValueError) as error:
            self.lose(server, str(error))
        else:
            server.missed = 0
            if not server.healthy:
                server.healthy = True
                log.info("the %s server %s is back", self._role, server.url)
            self._back.set()
            self._back.clear()

    async def _look_closely(self, server: Server) -> None:
        try:
            async with asyncio.timeout(EXAMINE_LIMIT_S):
                await self._examine(server)
        except TimeoutError as error:
            raise TransientServerError(
                f"{server.url} does not answer a first request within {EXAMINE_LIMIT_S:g} s"
            ) from error
        server.examined = True
