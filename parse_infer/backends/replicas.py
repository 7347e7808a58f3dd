"""Several servers with the same model: which one is asked, and what happens when a request fails.

Every request holds all of its state, so a failed one is sent again, to another server or to the same one once it is
back; a partly written answer continues where it stopped. A failed request says nothing about its server: only a health
check takes a server out (`HealthChecks`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from parse_infer.backends.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.handshake import Identity
from parse_infer.backends.health import HealthChecks, Server
from parse_infer.backends.retries import Attempts, Failing, Lease, Replaced, Unavailable

PATIENCE_S = 120.0  # while no server is well
_PULSE_S = 0.5
_BACK_OFF_S = 0.05  # before the second attempt at the same server; twice as long before each further one


async def _nothing_to_examine(server: Server) -> None:
    pass


class ReplicaPool:
    """
    Args:
        role: for messages: "target" or "draft".
        urls: at least one.
        failure: says why the servers will not come back, once that is known (None: they may).
        patience_s: how long a request waits while no server is well.
        judge: see `Identity`.

    Attributes:
        identity: what they serve.
        fields: of every request.
        examine: looks closely at a server that has come, or has come back; ValueError: it must not be used.
    """

    def __init__(
        self,
        role: str,
        urls: Sequence[str],
        client: Client,
        failure: Callable[[], str | None] = lambda: None,
        patience_s: float = PATIENCE_S,
        judge: str | None = None,
    ) -> None:
        if not urls:
            raise ValueError(f"no address of a {role} server was given")
        self.role = role
        self.members = [Server(url) for url in urls]
        self.identity = Identity(role, client, judge)
        self.fields: dict[str, Any] = {}
        self.patience_s = patience_s
        self.examine: Callable[[Server], Awaitable[None]] = _nothing_to_examine
        self._client = client
        self._failure = failure
        self._health = HealthChecks(role, self.members, client, self.identity.check, self._examine)

    @property
    def model(self) -> str:
        return self.identity.model

    @property
    def judging_model(self) -> str:
        """What a request about a draft names as its model: a server with another adapter refuses it."""
        return self.identity.judge or self.model

    @property
    def can_judge(self) -> bool:
        """Whether a server that is well runs the right adapter; also while none is well, as any may come back."""
        return not self.count() or self.count(judging=True) > 0

    def replaced(self) -> Replaced:
        """The error where none of them does."""
        return Replaced(f"no {self.role} server that answers runs the adapter {self.identity.judge}")

    def count(self, judging: bool = False) -> int:
        """Servers that are well, or those of them that run the right adapter."""
        return sum(server.healthy and (server.judges or not judging) for server in self.members)

    async def handshake(self) -> None:
        """Ask each server what it serves, and examine it. Those that do not answer are checked until they do.

        Raises as `Identity.meet` does.
        """
        await self.identity.handshake(self.members, self.examine)

    @contextmanager
    def acquire(self, patience_s: float | None = None, judging: bool = False) -> Iterator[Lease]:
        """A place for all requests of an answer, at the server with the least to do. See `Lease`.

        Args:
            judging: some of them are about a draft.
        """
        healthy = [server for server in self.members if server.healthy] or self.members
        able = [server for server in healthy if server.judges or not judging] or healthy
        lease = Lease(_least_busy(able), patience_s)
        try:
            yield lease
        finally:
            lease.server.busy -= 1

    async def ask(self, body: dict[str, Any], lease: Lease | None = None, judging: bool = False) -> Any:
        """The answer to a completion request of one token for each prompt.

        Args:
            judging: about a draft; then only servers with the right adapter are asked.

        Raises:
            Unavailable: no server gives one.
            Refused: a server does not accept it.
            Replaced: no server that is well has the adapter.
        """
        body = self._addressed(body)
        return await self._tried(lambda url: self._client.post(url, body), lease, judging=judging)

    async def ask_one(self, server: Server, body: dict[str, Any]) -> Any:
        """The same from this server, once, however it is. Raises Lost or Refused."""
        return await self._client.post(f"{server.url}/v1/completions", self._addressed(body))

    async def written(
        self,
        ids: Sequence[int],
        most: int,
        settings: dict[str, Any],
        lease: Lease | None = None,
        watched: bool = True,
    ) -> AsyncGenerator[list[int], None]:
        """What the model writes behind `ids`, `most` tokens at most: as it comes if it is `watched`, else at once,
        which costs less. Raises as `ask` does."""
        if not watched:
            body = self._body(ids, most, settings)
            yield await self._tried(lambda url: self._client.whole(url, body), lease)
            return
        got: list[int] = []
        tried = Attempts()
        while tried.left:
            server = await self._server(lease, tried)
            body = self._body([*ids, *got], most - len(got), settings)
            if "min_tokens" in settings:  # of the whole text
                body["min_tokens"] = max(0, settings["min_tokens"] - len(got))
            async with self._trying(server, tried):
                async with aclosing(self._client.written(f"{server.url}/v1/completions", body)) as pieces:
                    while (piece := await self._next(server, pieces)) is not None:
                        got += piece
                        yield piece
                return
            if len(got) >= most or (got and got[-1] in settings["stop_token_ids"]):
                return  # only the news that it has ended was lost
        raise self._given_up(tried)

    async def relayed(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """What a server answers to a request of somebody else's, an object or those of a stream. Raises as `ask` does;
        a stream that has begun is not asked for again."""
        body = self._addressed(body)
        if not body.get("stream"):
            yield await self._tried(lambda url: self._client.post(url, body), None, path)
            return
        begun, tried = False, Attempts()
        while tried.left and not begun:
            server = await self._server(None, tried)
            async with self._trying(server, tried):
                async with aclosing(self._client.chunks(f"{server.url}{path}", body)) as chunks:
                    while (chunk := await self._next(server, chunks)) is not None:
                        begun = True
                        yield chunk
                return
        raise self._given_up(tried)

    def close(self) -> None:
        """Nothing is asked any more in this event loop."""
        self._health.close()

    async def _examine(self, server: Server) -> None:
        await self.examine(server)  # whatever it is by now

    def _addressed(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model} | body | self.fields

    def _body(self, ids: Sequence[int], most: int, settings: dict[str, Any]) -> dict[str, Any]:
        return self._addressed({"prompt": list(ids), "max_tokens": most, **settings})

    async def _tried(
        self,
        request: Callable[[str], Awaitable[Any]],
        lease: Lease | None,
        path: str = "/v1/completions",
        judging: bool = False,
    ) -> Any:
        tried = Attempts()
        while tried.left:
            server = await self._server(lease, tried, judging)
            async with self._trying(server, tried, judging), self._waiting(server):
                return await request(f"{server.url}{path}")
        raise self._given_up(tried)

    async def _server(self, lease: Lease | None, tried: Attempts, judging: bool = False) -> Server:
        """The server to ask next, as soon as one is well. Raises Unavailable or Replaced where none will be."""
        self._health.start()
        end = time.monotonic() + (self.patience_s if lease is None or lease.patience_s is None else lease.patience_s)
        while not (healthy := [server for server in self.members if server.healthy]):
            left = end - time.monotonic()
            reason = self._failure()
            if reason is not None or left <= 0:
                raise Unavailable(f"no {self.role} server answers: {reason or self.members[-1].last_error}")
            await self._health.change(min(left, _PULSE_S))
        able = [server for server in healthy if server.judges or not judging]
        if not able:
            raise self.replaced()
        times = min(map(tried.failed.count, able))
        able = [server for server in able if tried.failed.count(server) == times]
        if times:
            await asyncio.sleep(_BACK_OFF_S * 2 ** (times - 1))
        if lease is None:
            return _least_busy(able)
        if lease.server not in able:
            lease.move(_least_busy(able))
        return lease.server

    @asynccontextmanager
    async def _trying(self, server: Server, tried: Attempts, judging: bool = False) -> AsyncIterator[None]:
        """Around one attempt; where it fails and another one may not, goes on behind the block."""
        server.busy += 1
        try:
            yield
        except TransientServerError as error:
            tried.note(server, str(error))
            await self._health.check(server)
        except RequestRejected as error:
            if error.status != 404:
                raise
            await self._health.check(server)  # does it still serve what it did?
            if server.healthy and (server.judges or not judging):
                raise
            tried.note(server, str(error))
        finally:
            server.busy -= 1

    @asynccontextmanager
    async def _waiting(self, server: Server) -> AsyncIterator[None]:
        """Within the block a request waits for the server; Lost where a health check finds that it is gone."""
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
        """The next piece of a stream; None at its end."""
        async with self._waiting(server):
            return await anext(pieces, None)

    def _given_up(self, tried: Attempts) -> Failing:
        return Failing(f"the {self.role} servers have failed {len(tried.failed)} times: {tried.last_error}")


def _least_busy(servers: Sequence[Server]) -> Server:
    return min(servers, key=lambda server: server.busy)
