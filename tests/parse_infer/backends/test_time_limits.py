"""How long requests wait for a server, and that health checks survive whatever a server says."""

from __future__ import annotations

import asyncio
import logging

import pytest

from parse_infer.backends.pool.client import Client, TransientServerError
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import FailedAttempts, Failing
from parse_infer.serve.admission import Limits
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.fake_server import FakeServer, serving
from tests.parse_infer.backends.test_answers_over_servers import PROMPT
from tests.parse_infer.serve.conftest import running

TOOLS = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}]


def test_only_the_caller_limits_an_answer(engine, connect):
    coordinator, _, _ = connect(engine)

    async def limit() -> float | None:
        servers = coordinator.backend._target.servers
        await servers.ask({"prompt": [1], "max_tokens": 1})
        assert servers._client._session is not None
        return servers._client._session.timeout.sock_read

    assert coordinator.backend.run(limit()) is None


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"parse": {"mode": "target"}}])
def test_a_request_that_times_out_is_sent_once(engine, connect, fields):
    coordinator, (target,), _ = connect(engine)
    with running(LoopRunner(coordinator), engine, Limits(request_s=2.0)) as served:
        target.faults.extend(["hangs"] * 5)
        answer = served.chat(PROMPT, max_tokens=8, **fields)
        assert answer.status_code == 504 or '"code":"timeout"' in answer.text
    assert len(target.bodies) == 1


def test_a_server_may_become_unhealthy_while_a_wait_for_it_expires():
    async def wait() -> None:
        pool = ReplicaPool("target", ["http://127.0.0.1:9"], Client())
        (server,) = pool.members
        try:
            async with pool._waiting(server, limit_s=0.0):
                try:
                    await asyncio.sleep(10)
                finally:
                    pool._health.mark_unhealthy(server, "gone")
        finally:
            assert not server.waits
            await pool.aclose()

    with pytest.raises(TransientServerError, match="sent nothing for 0 s"):
        asyncio.run(wait())


@pytest.mark.parametrize("limit_s", [None, 60.0])
def test_a_wait_ends_when_its_server_becomes_unhealthy_and_says_why(limit_s):
    async def wait() -> None:
        pool = ReplicaPool("target", ["http://127.0.0.1:9"], Client())
        (server,) = pool.members
        try:
            async with pool._waiting(server, limit_s):
                asyncio.get_running_loop().call_soon(pool._health.mark_unhealthy, server, "gone")
                await asyncio.sleep(60)
        finally:
            await pool.aclose()

    with pytest.raises(TransientServerError, match="gone") as error:
        asyncio.run(wait())
    assert not error.value.timed_out


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_that_is_silent_beyond_a_given_limit_is_tried_once_more(engine, streamed):
    with serving(FakeServer(engine.target)) as server:
        server.faults.extend(["hangs"] * 5)

        async def write() -> None:
            pool = ReplicaPool("target", [server.url], Client(timeout_s=1.0), attempts=6)
            try:
                await pool.handshake()
                settings = {"stop_token_ids": [], "temperature": 0}
                async for _ in pool.written([1, 2], 4, settings, streamed=streamed):
                    pass
            finally:
                await pool.aclose()

        with pytest.raises(Failing, match=r"the target servers failed 2 times: .* [Tt]imeout"):
            asyncio.run(write())
        assert len(server.bodies) == 2


def test_other_failures_leave_the_attempts_as_they_are():
    tried = FailedAttempts(4)
    tried.record(server := FakeServerState(), "x")
    assert tried.left == 3
    tried.record(server, "x", timed_out=True)
    assert tried.left == 1
    tried.record(server, "x")
    assert tried.left == 0


class FakeServerState:
    last_error = ""


@pytest.mark.parametrize("error", [RecursionError(), MemoryError(), RuntimeError("secret"), KeyError("x"), OSError()])
def test_a_health_watcher_survives_every_error(engine, connect, quick_checks, error, caplog):
    coordinator, _, _ = connect(engine)
    servers = coordinator.backend._target.servers
    (server,) = servers.members
    coordinator.generate_target(PROMPT, max_new_tokens=4)  # starts the watcher
    identify = servers._health._identify

    async def fail(_: object) -> None:
        raise error

    servers._health._identify = fail
    assert soon(coordinator, lambda: not server.healthy)
    assert server.last_error == f"the health check of {server.url} failed: {type(error).__name__}"
    servers._health._identify = identify
    assert soon(coordinator, lambda: server.healthy), "the watcher is gone"
    assert coordinator.generate_target(PROMPT, max_new_tokens=4).token_ids
    assert any(record.exc_info for record in caplog.records if record.levelno >= logging.ERROR)


@pytest.mark.parametrize("card", [{"max_model_len": float("inf")}, {"max_model_len": [[]]}, {"root": {"a": []}}])
def test_a_malformed_model_card_ends_no_health_check(engine, connect, quick_checks, card):
    coordinator, (target,), _ = connect(engine)
    (server,) = coordinator.backend._target.servers.members
    coordinator.generate_target(PROMPT, max_new_tokens=4)
    target.card = card
    assert soon(coordinator, lambda: not server.healthy)
    target.card = {}
    assert soon(coordinator, lambda: server.healthy)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "required"}, {"parse": {"mode": "target"}}])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [401, 403])
def test_a_target_that_refuses_our_key_is_502_for_every_request(engine, connect, fields, stream, status):
    coordinator, (target,), _ = connect(engine)
    with running(LoopRunner(coordinator), engine) as served:
        target.key, target.refusal = "another", status
        answer = served.chat(PROMPT, max_tokens=8, stream=stream, **fields)
        if answer.status_code == 200:  # a stream that had begun
            assert stream and '"code":"target_refuses"' in answer.text and f"({status})" in answer.text
        else:
            assert answer.status_code == 502, answer.text
            assert answer.json()["error"]["code"] == "target_refuses" and f"({status})" in answer.text
        assert target.url not in answer.text
