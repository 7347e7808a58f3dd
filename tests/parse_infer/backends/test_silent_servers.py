"""Servers that take a connection and send nothing, and requests that must not be carried out twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from parse_infer.backends.pool import health
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import Failing, Unavailable

MODELS, ANSWER = b'{"data":[{"id":"m","max_model_len":99}]}', b'{"choices":[{"token_ids":[1],"finish_reason":"stop"}]}'


@dataclass
class Server:
    """Answers as its switches say.

    Attributes:
        silent: sends nothing to any request.
        works_on: sends nothing to requests for a text.
        loses: closes the connection of every request that it has carried out.
    """

    silent: bool = False
    works_on: bool = False
    loses: bool = False
    url: str = ""
    done: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    int(line.split(":")[1]) for line in head.lower().splitlines() if line.startswith("content-le")
                ]
                await reader.readexactly(sum(lengths))
                asks = not head.startswith("GET")
                if self.silent or (asks and self.works_on):
                    continue
                if asks:
                    self.done.append(head.split(" HTTP")[0])
                    if self.loses:
                        break
                body = MODELS if "/models" in head else ANSWER
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
        writer.close()


LIMIT_S = 3.0  # a busy machine answers within it


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(health, "CHECK_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(health, "RETRY_EVERY_S", 0.05)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come about within 30 s")


def pool_of(*servers: Server) -> ReplicaPool:
    return ReplicaPool("target", [server.url for server in servers], Client(), choose=lambda some: some[0])


@pytest.mark.slow
def test_a_silent_server_is_left_out_at_the_start():
    async def start() -> None:
        async with Server(silent=True).running() as silent, Server().running() as good, asyncio.timeout(60):
            pool = pool_of(silent, good)
            await pool.handshake()
            assert [(server.url, server.healthy) for server in pool.members] == [(silent.url, False), (good.url, True)]
            await pool.aclose()
            with pytest.raises(
                Unavailable, match=rf"the target server {silent.url} does not answer within 3 s: start"
            ):
                await pool_of(silent).handshake()

    asyncio.run(start())


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.slow
def test_a_request_leaves_a_vanished_server_though_nothing_lists_it(listed):
    async def ask() -> None:
        async with Server(works_on=True).running() as bad, Server().running() as good, asyncio.timeout(60):
            pool = pool_of(bad, good)
            await pool.handshake()
            with pool.acquire() as lease:
                waits = asyncio.ensure_future(pool.ask({"prompt": [1]}, lease))
                await until(lambda: lease.server.requests == 1)
                assert lease.server.url == bad.url
                if not listed:
                    pool._set_members([good.url])
                await asyncio.sleep(1.0)
                assert not waits.done(), "while its machine answers health checks, a slow answer may still come"
                bad.silent = True
                await waits
            assert good.done == ["POST /v1/completions"]
            await until(lambda: len(pool._health._watching) == (2 if listed else 1))  # nobody asks one that has gone
            await pool.aclose()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "fields", "times"),
    [
        ("POST", "/v1/files", None, 1),
        ("POST", "/v1/responses", {"background": True}, 1),
        ("POST", "/v1/responses", {"input": "?"}, 4),
        ("POST", "/v1/chat/completions", {"tools": []}, 4),
        ("POST", "/rerank?x=1", {"query": "?"}, 4),
    ],
)
def test_what_a_server_may_have_carried_out_is_not_repeated(method, path, fields, times):
    async def ask() -> None:
        async with Server(loses=True).running() as one, Server(loses=True).running() as other, asyncio.timeout(60):
            pool = pool_of(one, other)
            await pool.handshake()
            request = PassedRequest(method, path, b"{}", {}, fields)
            with pool.acquire() as lease, pytest.raises(Failing):
                async for _ in pool.passed(request, lease):
                    pass
            assert len(one.done + other.done) == times
            await pool.aclose()

    asyncio.run(ask())


def test_a_server_that_cannot_be_reached_has_carried_out_nothing():
    async def ask() -> None:
        async with Server().running() as gone, Server().running() as good, asyncio.timeout(60):
            pool = pool_of(gone, good)
            await pool.handshake()
            pool._health.close()
            pool.members[0].url = "http://127.0.0.1:9"
            with pool.acquire() as lease:
                pieces = [
                    piece async for piece in pool.passed(PassedRequest("POST", "/v1/files", b"x", {}, None), lease)
                ]
            assert pieces[1] == ANSWER and good.done == ["POST /v1/files"]
            await pool.aclose()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        (None, 1),
        ({"prompt": "?", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [], "n": "x"}, 1),
    ],
)
def test_a_passed_request_counts_the_answers_of_all_prompts(fields, answers):
    assert PassedRequest("POST", "/v1/completions", b"", {}, fields).answers == answers
