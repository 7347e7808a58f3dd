"""Replicas of one model: load balancing and retries.

Every request holds all of its state. A failed request is retried on another replica, or on the same one once it
recovers; a partly written answer continues where it stopped. Only a health check marks a replica unhealthy
(`HealthChecks`), never a failed request.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from parse_infer.backends.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.handshake import Identity
from parse_infer.backends.health import HealthChecks, Server
from parse_infer.backends.retries import FailedAttempts, Failing, Lease, Unavailable
from parse_infer.errors import ServerError

PATIENCE_S = 120.0  # while no replica is healthy
_PULSE_S = 0.5
ATTEMPTS = 4  # per request
BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 30.0
COMPLETIONS = "/v1/completions"


async def _nothing_to_examine(server: Server) -> None:
    pass


class ReplicaPool:
    """The replicas of one model.

    Args:
        role: "target" or "draft", for messages.
        urls: at least one address.
        client: used by this pool alone, which closes it.
        failure: returns why the servers cannot recover; None: they may recover.
        patience_s: how long a request waits while no replica is healthy.
        identity: takes the place of an `Identity` without model name.
        attempts: attempts per request.
        back_off_s: wait before the second attempt at the same replica; doubles with each further attempt.

    Attributes:
        identity: model and adapter of the replicas.
        fields: extra fields of every request.
        examine: checks a new or recovered replica thoroughly; raises ValueError if the replica must not be used.
    """

    def __init__(
        self,
        role: str,
        urls: Sequence[str],
        client: Client,
        failure: Callable[[], str | None] = lambda: None,
        patience_s: float = PATIENCE_S,
        identity: Identity | None = None,
        attempts: int = ATTEMPTS,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        if not urls:
            raise ServerError(f"the {role} needs the address of a server")
        self.role = role
        self.members = [Server(url) for url in urls]
        self.identity = identity or Identity(role, client)
        self.fields: dict[str, Any] = {}
        self.patience_s = patience_s
        self.examine: Callable[[Server], Awaitable[None]] = _nothing_to_examine
        self._client = client
        self._attempts, self._back_off_s = attempts, back_off_s
        self._failure = failure
        self._health = HealthChecks(role, self.members, client, self.identity.check, self._examine)

    @property
    def model(self) -> str:
        return self.identity.model

    def count(self) -> int:
        """Number of healthy replicas."""
        return sum(server.healthy for server in self.members)

    async def handshake(self) -> None:
        """Identify and examine each replica. Health checks go on with replicas that do not answer.

        Raises as `Identity.handshake` does.
        """
        await self.identity.handshake(self.members, self.examine)

    @contextmanager
    def acquire(self, patience_s: float | None = None, home: int | None = None) -> Iterator[Lease]:
        """Lease the least busy replica for all requests of one answer. See `Lease`.

        Args:
            home: index of the replica, modulo their number. Answers with a common prefix share the index.
        """
        healthy = [server for server in self.members if server.healthy] or self.members
        at = _least_busy(healthy) if home is None else self.members[home % len(self.members)]
        lease = Lease(at, patience_s)
        try:
            yield lease
        finally:
            lease.server.busy -= 1

    async def ask(
        self,
        body: dict[str, Any],
        lease: Lease | None = None,
        read: Callable[[Any, str], Any] = lambda response, url: response,
        path: str = COMPLETIONS,
    ) -> Any:
        """Send a request and return the response.

        Args:
            read: reads a response from an address; raises TransientServerError for an incomplete one.

        Raises:
            Unavailable: no server answers.
            RequestRejected: a server rejects the request.
        """
        body = self._with_common_fields(body, lease)

        async def request(url: str) -> Any:
            return read(await self._client.post(url, body), url)

        return await self._with_retries(request, lease, path)

    async def ask_one(self, server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
        """Send the request once to this replica, healthy or not. Raises TransientServerError or RequestRejected."""
        return await self._client.post(f"{server.url}{path}", self._with_common_fields(body))

    async def written(
        self,
        ids: Sequence[int],
        most: int,
        settings: dict[str, Any],
        lease: Lease | None = None,
        watched: bool = True,
        confidences: list[float] | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Yield at most `most` tokens after `ids`: streamed if `watched`, else all at once, which costs less.

        Args:
            confidences: takes the probability of each streamed token, if vLLM writes them.

        Raises as `ask` does.
        """
        if not watched:
            body = self._body(ids, most, settings, lease)
            yield await self._with_retries(lambda url: self._client.whole(url, body), lease)
            return
        got: list[int] = []
        tried = FailedAttempts(self._attempts)
        while tried.left:
            server = await self._server(lease, tried)
            body = self._body([*ids, *got], most - len(got), settings, lease)
            if "min_tokens" in settings:  # counts the whole text
                body["min_tokens"] = max(0, settings["min_tokens"] - len(got))
            if server.sglang:
                body["rid"] = uuid.uuid4().hex
            elif confidences is not None:
                body["logprobs"] = 0  # that of the token itself
            async with self._attempt(server, tried):
                url = f"{server.url}{COMPLETIONS}"
                async with aclosing(self._client.written(url, body, confidences)) as pieces:
                    while (piece := await self._next(server, pieces)) is not None:
                        got += piece
                        yield piece
                return
            if len(got) >= most or (got and got[-1] in settings["stop_token_ids"]):
                return  # the text is complete; only the end of the stream was lost
        raise self._failing(tried)

    async def relayed(self, path: str, body: dict[str, Any], lease: Lease | None = None) -> AsyncGenerator[Any, None]:
        """Pass a request through: yield the response object, or the objects of its stream.

        Raises as `ask` does. A stream that has begun is not retried.
        """
        body = self._with_common_fields(body, lease)
        if not body.get("stream"):
            yield await self._with_retries(lambda url: self._client.post(url, body), lease, path)
            return
        begun, tried = False, FailedAttempts(self._attempts)
        while tried.left and not begun:
            server = await self._server(lease, tried)
            async with self._attempt(server, tried):
                async with aclosing(self._client.chunks(f"{server.url}{path}", body)) as chunks:
                    while (chunk := await self._next(server, chunks)) is not None:
                        begun = True
                        yield chunk
                return
        raise self._failing(tried)

    async def aclose(self) -> None:
        """Stop the health checks and close the connections of this event loop. Requests may go on in another one."""
        self._health.close()
        await self._client.close()

    async def _examine(self, server: Server) -> None:
        await self.examine(server)  # looks the attribute up at each call

    def _with_common_fields(self, body: dict[str, Any], lease: Lease | None = None) -> dict[str, Any]:
        own = {} if lease is None or lease.cache_salt is None else {"cache_salt": lease.cache_salt}
        return {"model": self.model} | body | self.fields | own

    def _body(self, ids: Sequence[int], most: int, settings: dict[str, Any], lease: Lease | None) -> dict[str, Any]:
        return self._with_common_fields({"prompt": list(ids), "max_tokens": most, **settings}, lease)

    async def _with_retries(
        self,
        request: Callable[[str], Awaitable[Any]],
        lease: Lease | None,
        path: str = COMPLETIONS,
    ) -> Any:
        tried = FailedAttempts(self._attempts)
        while tried.left:
            server = await self._server(lease, tried)
            async with self._attempt(server, tried), self._waiting(server):
                return await request(f"{server.url}{path}")
        raise self._failing(tried)

    async def _server(self, lease: Lease | None, tried: FailedAttempts) -> Server:
        """Wait for the replica of the next attempt. Raises Unavailable if none gets healthy in time."""
        self._health.start()
        end = time.monotonic() + (self.patience_s if lease is None or lease.patience_s is None else lease.patience_s)
        while not (healthy := [server for server in self.members if server.healthy]):
            left = end - time.monotonic()
            reason = self._failure()
            if reason is not None or left <= 0:
                raise Unavailable(f"no {self.role} server answers: {reason or self.members[-1].last_error}")
            await self._health.wait_for_recovery(min(left, _PULSE_S))
        times = min(map(tried.failed.count, healthy))
        able = [server for server in healthy if tried.failed.count(server) == times]
        if times:
            await asyncio.sleep(min(self._back_off_s * 2.0 ** min(times - 1, 30), _LONGEST_BACK_OFF_S))
        if lease is None:
            return _least_busy(able)
        if lease.server not in able:
            lease.move(_least_busy(able))
        return lease.server

    @asynccontextmanager
    async def _attempt(self, server: Server, tried: FailedAttempts) -> AsyncIterator[None]:
        """Run one attempt; suppress an error that a retry may avoid."""
        server.busy += 1
        try:
            yield
        except TransientServerError as error:
            tried.record(server, str(error), error.timed_out)
            await self._health.check(server)
        except RequestRejected as error:
            if error.status != 404:
                raise
            await self._health.check(server)  # the server may serve another model now
            if server.healthy:
                raise
            tried.record(server, str(error))
        finally:
            server.busy -= 1

    @asynccontextmanager
    async def _waiting(self, server: Server) -> AsyncIterator[None]:
        """Wait for the server within the block; raise TransientServerError once a health check marks it unhealthy."""
        try:
            async with asyncio.timeout(None) as wait:
                server.waits.add(wait)
                try:
                    yield
                finally:
                    server.waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise TransientServerError(server.last_error) from error

    async def _next(self, server: Server, pieces: AsyncGenerator[Any, None]) -> Any:
        """The next piece of a stream, or None at its end."""
        async with self._waiting(server):
            return await anext(pieces, None)

    def _failing(self, tried: FailedAttempts) -> Failing:
        return Failing(f"the {self.role} servers failed {len(tried.failed)} times: {tried.last_error}")


def _least_busy(servers: Sequence[Server]) -> Server:
    return min(servers, key=lambda server: server.busy)
