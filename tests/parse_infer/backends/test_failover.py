"""The replica of a request: a healthy one, the same for a whole answer, and none that has vanished."""

from __future__ import annotations

import asyncio
import inspect
import logging

import pytest
import uvicorn

from parse_infer.backends.pool import client, health
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.retries import Failing, Unavailable
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.backends.conftest import WAIT_S, soon
from tests.parse_infer.backends.test_answers_over_servers import PROMPT, partial_threshold, same


@pytest.mark.parametrize("fault", ["nonsense", "half", "500"])
def test_a_request_that_fails_everywhere_opens_no_circuit(engine, connect, fault, caplog):
    coordinator, targets, _ = connect(engine, n_targets=2)
    caplog.set_level(logging.INFO, "parse_infer.backends")
    for target in targets:
        target.faults.extend([fault] * 4)
    with pytest.raises(Failing, match="the target servers failed 4 times: "):
        coordinator.generate_target(PROMPT, max_new_tokens=8)
    assert [server.healthy for server in coordinator.backend._target.servers.members] == [True, True]
    assert [len(target.bodies) for target in targets] == [2, 2], "each is tried, and nobody more than the other"
    assert not caplog.records, "nothing has happened to a server"


def test_a_stream_that_breaks_off_often_goes_on_as_long_as_tokens_come(engine, connect):
    coordinator, (target,), _ = connect(engine)
    wanted = coordinator.generate_target(PROMPT, max_new_tokens=60).token_ids
    target.faults.extend(["cut"] * 6)
    *_, done = coordinator.stream_target(PROMPT, max_new_tokens=60)
    assert done.generation.token_ids == wanted and not target.faults
    target.faults.extend(["500"] * 4)
    with pytest.raises(Failing):
        list(coordinator.stream_target(PROMPT, max_new_tokens=60))


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_a_shutdown_ends_is_written_by_another_server(engine, connect, streamed):
    coordinator, targets, _ = connect(engine, n_targets=2)
    wanted = coordinator.generate_target(PROMPT, max_new_tokens=8).token_ids
    for _ in range(4):
        targets[0].faults.append("abort")
        if streamed:
            *_, done = coordinator.stream_target(PROMPT, max_new_tokens=8)
            found = done.generation
        else:
            found = coordinator.generate_target(PROMPT, max_new_tokens=8)
        assert found.token_ids == wanted
    assert len(targets[0].faults) < 4, "some of them came to the server that ends"


def test_a_server_with_broken_connections_is_unused_until_it_is_healthy(engine, connect, caplog):
    coordinator, targets, _ = connect(engine, n_targets=2)
    caplog.set_level(logging.INFO, "parse_infer.backends")
    wanted = coordinator.generate_target(PROMPT, max_new_tokens=8).token_ids
    first, second = coordinator.backend._target.servers.members
    targets[0].offline = True
    assert coordinator.generate_target(PROMPT, max_new_tokens=8).token_ids == wanted
    assert (first.healthy, second.healthy) == (False, True)
    targets[1].bodies.clear()
    coordinator.generate_target([PROMPT] * 3, max_new_tokens=8)
    assert len(targets[1].bodies) == 3
    targets[0].offline = False
    assert soon(coordinator, lambda: first.healthy)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert said[0].startswith(f"the target server {targets[0].url} is unhealthy: ") and "does not answer" in said[0]
    assert said[1] == f"the target server {targets[0].url} is healthy again"


def test_a_health_check_finds_an_unhealthy_server_before_a_request(engine, connect, quick_checks):
    coordinator, targets, _ = connect(engine, n_targets=2)
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    first, second = coordinator.backend._target.servers.members
    targets[0].health_status = 503
    assert soon(coordinator, lambda: not first.healthy) and second.healthy
    targets[0].bodies.clear()
    coordinator.generate_target([PROMPT] * 3, max_new_tokens=8)
    assert not targets[0].bodies
    targets[0].health_status = None
    assert soon(coordinator, lambda: first.healthy)


@pytest.mark.parametrize(("status", "text"), [(None, "OK"), (204, ""), (None, "<html>fine</html>")])
def test_health_is_a_status_whatever_the_text(engine, connect, quick_checks, status, text):
    coordinator, (target,), _ = connect(engine)
    target.health_status, target.health = status, text
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    checks = len(target.clients)
    assert soon(coordinator, lambda: len(target.clients) > checks + 6)
    (server,) = coordinator.backend._target.servers.members
    assert server.healthy and not server.last_error


def test_a_server_is_unhealthy_after_several_missed_health_checks(engine, connect, quick_checks, monkeypatch):
    monkeypatch.setattr(health, "CHECKS_MISSED", 1_000_000)
    coordinator, (target,), _ = connect(engine)
    monkeypatch.setattr(health, "CHECK_LIMIT_S", 0.2)
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    target.health_status = "hangs"
    checks = len(target.clients)
    assert soon(coordinator, lambda: len(target.clients) > checks + 4)
    (server,) = coordinator.backend._target.servers.members
    assert server.healthy and coordinator.generate_target(PROMPT, max_new_tokens=8).token_ids
    monkeypatch.setattr(health, "CHECKS_MISSED", 3)
    assert soon(coordinator, lambda: not server.healthy)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.slow
def test_a_request_does_not_wait_for_a_server_that_has_vanished(engine, connect, quick_checks, monkeypatch, streamed):
    """As where a machine is gone: no connection breaks, but nothing comes any more."""
    coordinator, targets, _ = connect(engine, n_targets=2)
    monkeypatch.setattr(health, "CHECK_LIMIT_S", 0.2)
    wanted = coordinator.generate_target(PROMPT, max_new_tokens=8).token_ids
    targets[0].faults.extend(["hangs"] * 4)
    targets[0].health_status = "hangs"

    async def answered() -> list[int]:
        async with asyncio.timeout(WAIT_S):
            *_, done = [
                e
                async for e in coordinator.events(
                    PROMPT, GenerationSettings(max_new_tokens=8), alone=True, streamed=streamed
                )
            ]
        return done.generation.token_ids

    assert coordinator.backend.run(answered()) == wanted


@pytest.mark.slow
def test_after_a_failure_the_rest_of_an_answer_stays_with_the_other_server(engine, connect):
    """There its prefix is cached, so the answer does not return to the first server although it is healthy."""
    coordinator, targets, draft = connect(engine, n_targets=2)
    settings = {"max_new_tokens": 60, "threshold": partial_threshold(engine), "block_tokens": 12}
    draft.pause = 0.1  # time enough for a server to come back
    targets[0].faults.append("500")
    found = coordinator.generate(PROMPT, **settings)
    assert same(found, engine.generate(PROMPT, **settings))
    assert len(targets[0].bodies) == 1 and len(targets[1].bodies) > 2
    assert [server.busy for server in coordinator.backend._target.servers.members] == [0, 0]
    assert all(server.healthy for server in coordinator.backend._target.servers.members)


def test_offline_servers_raise_unavailable(engine, connect):
    coordinator, (target,), _ = connect(engine, patience_s=0.2)
    target.offline = True
    with pytest.raises(Unavailable, match=r"no target server answers: .* does not answer") as raised:
        coordinator.generate_target(PROMPT, max_new_tokens=8)
    assert not isinstance(raised.value, Failing)


def test_a_server_that_hangs_at_the_start_is_named(engine, connect, monkeypatch):
    coordinator, (target,), _ = connect(engine)
    monkeypatch.setattr(health, "EXAMINE_LIMIT_S", 0.2)
    target.faults.append("hangs")
    with pytest.raises(Unavailable, match=f"target server {target.url} does not answer a first request within 0.2 s"):
        coordinator.backend.run(coordinator.backend.handshake())


def test_idle_connections_end_before_the_server_closes_them(engine, connect, monkeypatch):
    """vLLM is served by uvicorn, which closes a connection after 5 s without a request."""
    assert inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default > client.KEEP_ALIVE_S
    _coordinator, (target,), _ = connect(engine)
    for keep_alive_s, reused in ((5.0, True), (0.05, False)):
        monkeypatch.setattr(client, "KEEP_ALIVE_S", keep_alive_s)

        async def ask_twice() -> None:
            http = Client()
            for _ in range(2):
                await http.text(f"{target.url}/health")
                await asyncio.sleep(0.2)
            await http.close()

        target.clients.clear()
        asyncio.run(ask_twice())
        assert (len(set(target.clients)) == 1) == reused, target.clients
