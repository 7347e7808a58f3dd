"""Replicas of one model: load balancing and retries.

Every request holds all of its state. A failed request is retried on another replica, or on the same one once it
recovers; a partly written answer continues where it stopped. Only a health check marks a replica unhealthy
(`HealthChecks`). Failed requests open its `Circuit`: it gets fewer requests, or with optional ones none for a while.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from parse_infer.backends.pool.balancer import Balancer
from parse_infer.backends.pool.circuit import FAILURES, Circuit
from parse_infer.backends.pool.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.pool.discovery import Discovery, resolve
from parse_infer.backends.pool.health import HealthChecks, Replica
from parse_infer.backends.pool.identity import Identity
from parse_infer.backends.pool.observer import PoolObserver
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.backends.pool.retries import TRIAL_SILENCE_S, Attempt, FailedAttempts, Lease, headers_of
from parse_infer.backends.pool.server_load import ServerLoad
from parse_infer.backends.pool.sessions import Session
from parse_infer.backends.servers.dialects.dialect import COMPLETIONS
from parse_infer.errors import ServerError

T = TypeVar("T")
log = logging.getLogger("parse_infer.backends")

PATIENCE_S = 120.0  # while no replica is healthy
ATTEMPTS = 4  # per request, not counting those that brought tokens of a stream
BACK_OFF_S = 0.05
_INVALID = (400, 413, 422)  # rejections that concern the request; others concern the server or its key


async def _nothing_to_examine(server: Replica) -> None:
    pass


class ReplicaPool:
    """The replicas of one model.

    Args:
        role: "target" or "draft", for messages.
        urls: at least one address, or source of addresses (`Discovery`).
        client: used by this pool alone, which closes it.
        failure: returns why the servers cannot recover; None: they may recover.
        patience_s: how long a request waits while no replica is healthy.
        identity: takes the place of an `Identity` without model name.
        attempts: attempts per request.
        back_off_s: wait before the second attempt at the same replica; doubles with each further attempt.
        clock: returns seconds, for circuits and patience.
        choose: chooses among the least busy replicas.

    Attributes:
        identity: model and adapter of the replicas.
        fields: extra fields of every request.
        examine: checks a new or recovered replica thoroughly; raises ValueError if the replica must not be used.
        recognise: part of each health check; raises likewise.
        observer: takes reports about requests and replicas.
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
        clock: Callable[[], float] = time.monotonic,
        choose: Callable[[Sequence[Replica]], Replica] = random.choice,
    ) -> None:
        if not urls:
            raise ServerError(f"the {role} needs the address of a server")
        self.role = role
        self.members = [Replica(url, Circuit(clock)) for url in resolve(urls)]
        if not self.members:
            raise ServerError(f"{' and '.join(urls)} names no {role} server")
        self.observer = PoolObserver()
        self.identity = identity or Identity(role, client)
        self.fields: dict[str, Any] = {}
        self.patience_s = patience_s
        self.examine: Callable[[Replica], Awaitable[None]] = _nothing_to_examine
        self.recognise: Callable[[Replica], Awaitable[None]] = _nothing_to_examine
        self._client = client
        self._attempts, self._back_off_s, self._clock = attempts, back_off_s, clock
        self._health = HealthChecks(role, self.members, client, self._identify, self._examine, self._report_unhealthy)
        self._balancer = Balancer(role, self.members, self._health, failure, clock, choose)
        self._discovery = Discovery(role, urls, self._set_members)
        self._load = ServerLoad(self.members, client, clock)
        self._trials: dict[Replica, asyncio.Task[None]] = {}

    @property
    def model(self) -> str:
        return self.identity.model

    def count(self) -> int:
        """Number of healthy replicas."""
        return sum(server.healthy for server in self.members)

    def load(self, running: int) -> int:
        """Requests on each replica while `running` answers are in flight; see `ServerLoad.of`."""
        return self._load.of(running)

    def watch(self) -> None:
        """Watch the replicas from now on, as the first request does."""
        self._health.start()
        self._discovery.start()

    async def handshake(self) -> None:
        """Identify and examine each replica. Health checks go on with replicas that do not answer.

        Raises as `Identity.handshake` does.
        """
        await self.identity.handshake(self.members, self.examine)

    @contextmanager
    def acquire(
        self, optional: bool = False, home: int | None = None, session: Session | None = None
    ) -> Iterator[Lease]:
        """Lease a replica for all requests of one answer.

        Args:
            optional: see `Lease`.
            home: index of the replica, modulo their number. Answers with a common prefix share the index.
            session: of the answer, so that it finds the cache of earlier ones; None, or one that never returns: any
                of the least busy replicas.
        """
        lease = Lease(self._balancer.first(home, session), optional, session)
        try:
            yield lease
        finally:
            lease.server.busy -= 1
            if session is not None:
                self._balancer.remember(session, lease.server)

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

        async def request(url: str) -> object:
            return read(await self._client.post(url, body, headers_of(lease)), url)

        return await self._with_retries(request, lease, path)

    async def ask_one(self, server: Replica, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
        """Send the request once to this replica, healthy or not. Raises TransientServerError or RequestRejected."""
        return await self._client.post(f"{server.url}{path}", self._with_common_fields(body))

    async def written(
        self,
        ids: Sequence[int],
        max_tokens: int,
        settings: dict[str, Any],
        lease: Lease | None = None,
        streamed: bool = True,
        confidences: list[float] | None = None,
        silence_s: float | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Yield at most `max_tokens` tokens after `ids`: streamed if `streamed`, else all at once, which costs less.

        Args:
            silence_s: how long a streaming server may send nothing.
            confidences: takes the probability of each streamed token, if the server lists them.

        Raises as `ask` does.
        """
        if not streamed:
            body = self._body(ids, max_tokens, settings, lease)
            yield await self._with_retries(lambda url: self._client.whole(url, body, headers_of(lease)), lease)
            return
        received: list[int] = []
        tried = self._no_attempts(lease)
        if tried.optional:
            whole = self._body(ids, max_tokens, settings, lease)
            self._start_trials(
                lambda one: self._client.written(
                    f"{one.url}{COMPLETIONS}", one.dialect.stream(whole, False), None, None, headers_of(lease)
                )
            )
        while tried.left:
            server = await self._server(lease, tried)
            before = len(received)
            body = self._body([*ids, *received], max_tokens - len(received), settings, lease)
            if "min_tokens" in settings:  # counts the whole text
                body["min_tokens"] = max(0, settings["min_tokens"] - len(received))
            body = server.dialect.stream(body, confidences is not None)
            abort = server.dialect.abort(body)
            async with self._attempt(server, tried) as attempt:
                url = f"{server.url}{COMPLETIONS}"
                async with aclosing(self._client.written(url, body, confidences, abort, headers_of(lease))) as pieces:
                    while (piece := await self._next(attempt, pieces, silence_s)) is not None:
                        attempt.answered = True
                        received += piece
                        yield piece
                return
            if not tried.optional and len(received) > before:
                tried.attempts += 1  # it was of use: a long answer may meet many failures
            if len(received) >= max_tokens or (received and received[-1] in settings["stop_token_ids"]):
                return  # the text is complete; only the end of the stream was lost
        raise self._balancer.failing(tried)

    async def relayed(
        self,
        path: str,
        body: dict[str, Any],
        lease: Lease | None,
        silence_s: float | None,
        read: Callable[[Any, str], T],
    ) -> AsyncGenerator[T, None]:
        """Stream a request: yield what `read` makes of the objects of its response.

        Args:
            silence_s: as in `written`.
            read: reads an object from an address; raises TransientServerError for an incomplete one.

        Raises as `ask` does, and retries no stream that has begun.
        """
        body = self._with_common_fields(body, lease)
        begun, tried = False, self._no_attempts(lease)
        if tried.optional:
            self._start_trials(lambda one: self._client.chunks(f"{one.url}{path}", body, headers_of(lease)))
        while tried.left and not begun:
            server = await self._server(lease, tried)
            async with self._attempt(server, tried) as attempt:
                async with aclosing(self._client.chunks(f"{server.url}{path}", body, headers_of(lease))) as chunks:
                    while (chunk := await self._next(attempt, chunks, silence_s)) is not None:
                        piece = read(chunk, server.url)
                        attempt.answered = begun = True
                        yield piece
                return
        raise self._balancer.failing(tried)

    async def passed(self, request: PassedRequest, lease: Lease) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Pass a request on unchanged: yield the head of the response, then its body. See `Client.passed`.

        Raises as `ask` does. A response that has begun is not retried, nor a request that is not `repeatable` and that
        a server may have carried out.
        """
        request = replace(request, headers={**request.headers, **headers_of(lease)})
        begun, tried = False, self._no_attempts(lease, request.repeatable)
        while tried.left and not begun:
            server = await self._server(lease, tried)
            async with self._attempt(server, tried) as attempt:
                async with aclosing(self._client.passed(request, server.url)) as pieces:
                    while (piece := await self._next(attempt, pieces, None)) is not None:
                        attempt.answered = begun = True
                        if isinstance(piece, ResponseHead) and piece.status >= 400:
                            self._end(attempt, "rejected")
                        yield piece
                return
        raise self._balancer.failing(tried)

    async def aclose(self) -> None:
        """Stop watching the replicas and close the connections of this event loop; another one may go on."""
        self._discovery.close()
        self._health.close()
        self._load.close()
        for trial in self._trials.values():
            with suppress(RuntimeError):  # its event loop has ended
                trial.cancel()
        self._trials.clear()
        await self._client.close()

    def _set_members(self, urls: Sequence[str]) -> None:
        """Take the replicas at these addresses, each given once.

        A new one gets requests once it has been examined. Requests at one that has gone end there, and later ones of
        their answers go elsewhere.
        """
        before = {server.url: server for server in self.members}
        for url in (url for url in urls if url not in before):
            server = Replica(url, Circuit(self._clock))
            server.healthy, server.last_error = False, f"{url} has not been examined yet"
            self.members.append(server)
            self._health.add(server)
            log.info("new %s server %s", self.role, url)
        for url in before.keys() - set(urls):
            self.members.remove(before[url])
            self._health.remove(before[url])
            log.info("the %s server %s has gone", self.role, url)

    async def _identify(self, server: Replica) -> None:
        await self.identity.check(server)
        await self.recognise(server)

    async def _examine(self, server: Replica) -> None:
        await self.examine(server)  # looks the attribute up at each call

    def _report_unhealthy(self, server: Replica) -> None:
        self.observer.ejected(server.url, "unhealthy")

    def _with_common_fields(self, body: dict[str, Any], lease: Lease | None = None) -> dict[str, Any]:
        own = {} if lease is None or lease.cache_salt is None else {"cache_salt": lease.cache_salt}
        return {"model": self.model} | body | self.fields | own

    def _body(
        self, ids: Sequence[int], max_tokens: int, settings: dict[str, Any], lease: Lease | None
    ) -> dict[str, Any]:
        return self._with_common_fields({"prompt": list(ids), "max_tokens": max_tokens, **settings}, lease)

    async def _with_retries(
        self,
        request: Callable[[str], Awaitable[T]],
        lease: Lease | None,
        path: str = COMPLETIONS,
    ) -> T:
        tried = self._no_attempts(lease)
        while tried.left:
            server = await self._server(lease, tried)
            async with self._attempt(server, tried), self._waiting(server):
                return await request(f"{server.url}{path}")
        raise self._balancer.failing(tried)

    def _no_attempts(self, lease: Lease | None, repeatable: bool = True) -> FailedAttempts:
        optional = lease is not None and lease.optional
        attempts = len(self.members) if optional else self._attempts
        return FailedAttempts(attempts, self._back_off_s, optional, repeatable)

    async def _server(self, lease: Lease | None, tried: FailedAttempts) -> Replica:
        self.watch()
        return await self._balancer.next(lease, tried, self.patience_s)

    @asynccontextmanager
    async def _attempt(self, server: Replica, tried: FailedAttempts) -> AsyncIterator[Attempt]:
        """Run one attempt; suppress an error that a retry may avoid."""
        server.busy += 1
        server.requests += 1
        attempt = Attempt(server, tried.optional, self._clock())
        if tried.failed:
            self.observer.retried(server.url)
        try:
            yield attempt
            self._end(attempt, "ok")
        except TransientServerError as error:
            tried.record(server, str(error), error.timed_out, error.unread)
            limited = "rate_limited" if error.status == 429 else "failed"
            self._end(attempt, "timed_out" if error.timed_out else limited, error.retry_after_s)
            await self._check(server, tried)
        except RequestRejected as error:
            if error.status in _INVALID:
                self._end(attempt, "rejected")
                raise
            server.last_error = f"{server.url} rejects requests ({error.status})"
            self._end(attempt, "refused")
            if error.status == 404:  # the server may serve another model now
                await self._check(server, tried)
            others = {other for other in self.members if other.healthy} - {server, *tried.failed}
            if server.healthy and not (others and tried.left > 1):
                raise
            tried.record(server, server.last_error)
        finally:
            server.busy -= 1
            server.requests -= 1
            self._end(attempt, "ok" if attempt.answered else "cancelled")

    def _start_trials(self, stream: Callable[[Replica], AsyncGenerator[Any, None]]) -> None:
        """Send an optional request also to each server whose circuit is open and admits a trial.

        No answer waits for it: after its first piece the trial ends, and later requests use the server again.
        """
        for server in self.members:
            if server.healthy and server.circuit.is_open and server.circuit.admits and server not in self._trials:
                self._trials[server] = asyncio.get_running_loop().create_task(self._try(server, stream(server)))

    async def _try(self, server: Replica, pieces: AsyncGenerator[Any, None]) -> None:
        try:
            async with self._attempt(server, FailedAttempts(1, optional=True)) as attempt, aclosing(pieces):
                await self._next(attempt, pieces, TRIAL_SILENCE_S)
        except RequestRejected as error:
            log.debug("the %s server %s rejects a trial: %s", self.role, server.url, error)
        finally:
            self._trials.pop(server, None)

    async def _check(self, server: Replica, tried: FailedAttempts) -> None:
        """Check a server's health; an optional request does not wait for the result."""
        check = self._health.start_check(server)
        if not tried.optional:
            await asyncio.shield(check)

    def _end(self, attempt: Attempt, outcome: str, rest_s: float | None = None) -> None:
        """Count an attempt, once, and tell the server's circuit."""
        if attempt.ended:
            return
        attempt.ended = True
        server, circuit, was_open = attempt.server, attempt.server.circuit, attempt.server.circuit.is_open
        self.observer.ended(server.url, outcome, self._clock() - attempt.begun_at)
        if outcome in ("ok", "rejected"):
            circuit.succeed(attempt.begun)
            if was_open and not circuit.is_open:
                log.info("the %s server %s gets requests again", self.role, server.url)
        elif outcome == "cancelled" or (outcome == "failed" and attempt.optional and attempt.answered):
            circuit.leave(attempt.begun)  # the beginning of a draft is of use
        elif circuit.fail(attempt.begun, 1 if attempt.optional else FAILURES, rest_s):
            self.observer.ejected(server.url, "failing")
            log.warning(
                "the %s server %s is out for %.0f s after failed requests: %s",
                *(self.role, server.url, circuit.pause_s, server.last_error),
            )
            if attempt.optional:  # answers that wait for this server need not find out each by itself
                self._health.end_waits(server)

    @asynccontextmanager
    async def _waiting(self, server: Replica, limit_s: float | None = None) -> AsyncIterator[None]:
        """Wait for the server within the block. Raise TransientServerError after `limit_s`, or once a health check
        marks the server unhealthy."""
        wait = asyncio.timeout(limit_s)
        end = wait.when()
        server.waits.add(wait)
        try:
            async with wait:
                yield
        except TimeoutError as error:
            if not wait.expired():
                raise
            if wait.when() != end:  # `HealthChecks.end_waits`
                raise TransientServerError(server.last_error) from error
            message = f"{server.url} sent nothing for {limit_s or 0:g} s"
            raise TransientServerError(message, timed_out=True) from error
        finally:
            server.waits.discard(wait)

    async def _next(self, attempt: Attempt, pieces: AsyncGenerator[T, None], silence_s: float | None) -> T | None:
        """The next piece of a stream, or None at its end. Raises TransientServerError after `silence_s` of silence."""
        limit_s = attempt.limit_s(silence_s)
        async with self._waiting(attempt.server, limit_s):
            return await anext(pieces, None)
