"""Replicas that come and go without a restart."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from parse_infer.backends.pool import discovery, health
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.discovery import resolve
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.options import ServerOptions
from parse_infer.errors import ServerError, SettingsError
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.serve.conftest import running

CHAT = "/v1/chat/completions"


def test_a_name_has_the_addresses_of_its_records(monkeypatch):
    records = {"parse-target": ["10.0.0.9", "10.0.0.7", "10.0.0.9", "fd00::1"]}

    def getaddrinfo(host, port, type):
        if host not in records:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(None, type, 6, "", (address, port)) for address in records[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = resolve(["dns+http://parse-target:8000/v1", "http://other:1"])
    assert found == [
        "http://10.0.0.7:8000",
        "http://10.0.0.9:8000",
        "http://[fd00::1]:8000",
        "http://other:1",
    ]
    with pytest.raises(ServerError, match="dns\\+http://nowhere:80 cannot be read: Name or service not known"):
        resolve(["dns+http://nowhere:80"])


def test_a_file_has_an_address_a_line(tmp_path: Path):
    file = tmp_path / "targets.txt"
    file.write_text("# ours\nhttp://a:1\n\n  http://b:2/v1 \nhttp://a:1/v1/\n")
    assert resolve([f"file:{file}", "http://a:1"]) == ["http://a:1", "http://b:2"]
    file.write_text("http://a:1\nb:2\n")
    with pytest.raises(ServerError, match="has the line 'b:2', which does not begin with http"):
        resolve([f"file:{file}"])
    with pytest.raises(ServerError, match=r"nothing\.txt cannot be read: No such file"):
        resolve([f"file:{tmp_path}/nothing.txt"])
    file.write_text("\n")
    with pytest.raises(ServerError, match="names no target server"):
        ReplicaPool("target", [f"file:{file}"], Client())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gpu:8000", r"must begin with http:// or https://, or be dns\+http://NAME:PORT or file:PATH"),
        ("dns+http://gpu", r"has no port: write dns\+http://NAME:PORT"),
        ("dns+https://gpu:1", "'dns\\+https://gpu:1' is not a server address"),
    ],
)
def test_a_wrong_source_is_refused_before_anything_starts(url, message):
    with pytest.raises(SettingsError, match=message):
        ServerOptions(target_url=url)


@pytest.mark.slow
def test_replicas_come_and_go_under_requests(engine, connect, monkeypatch, tmp_path, capfd):
    """Also where the file is away for a moment; a server of another model gets no request."""
    monkeypatch.setattr(discovery, "EVERY_S", 0.05)
    monkeypatch.setattr(health, "RETRY_EVERY_S", 0.05)
    coordinator, targets, _ = connect(engine, n_targets=3)
    pool, file = coordinator.backend.servers["target"], tmp_path / "targets.txt"

    def listed(*servers) -> None:
        beside = tmp_path / "new.txt"
        beside.write_text("".join(f"{server.url}\n" for server in servers))
        beside.replace(file)

    def wait_for(what) -> None:
        end = time.monotonic() + 10
        while not what() and time.monotonic() < end:
            time.sleep(0.02)
        assert what()

    def used() -> list[bool]:
        before = [len(target.bodies) for target in targets]
        for number in range(30):  # each goes to the server that its hash chooses
            body = {"messages": [{"role": "user", "content": f"{number} apples?"}], "max_tokens": 4}
            assert served.post(CHAT, body).status_code == 200
        return [len(target.bodies) > n for target, n in zip(targets, before, strict=True)]

    listed(*targets[:2])
    pool._discovery = discovery.Discovery("target", [f"file:{file}"], pool._set_members)
    with running(LoopRunner(coordinator), engine) as served:
        assert served.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}).status_code == 200
        wait_for(lambda: len(pool.members) == 2)
        assert used() == [True, True, False]
        listed(*targets[1:])
        wait_for(lambda: {server.url for server in pool.members if server.healthy} == {t.url for t in targets[1:]})
        assert used() == [False, True, True]
        file.unlink()
        wait_for(lambda: pool._discovery._failed)
        # Read once: what a thread writes while `capfd` is being read may be lost.
        assert "servers stay as they are" in capfd.readouterr().err
        file.write_text("\n")
        time.sleep(0.2)
        assert used() == [False, True, True], "an empty list changes nothing"
        targets[0].names[:] = ["another model"]
        listed(*targets)
        wait_for(lambda: len(pool.members) == 3 and "serves 'another model'" in pool.members[-1].last_error)
        assert used() == [False, True, True]


def test_a_new_server_gets_no_request_before_it_has_been_examined():
    async def change() -> None:
        pool = ReplicaPool("target", ["http://a:1"], Client())
        pool._set_members(["http://a:1", "http://b:2"])
        assert [(server.url, server.healthy) for server in pool.members] == [
            ("http://a:1", True),
            ("http://b:2", False),
        ]
        with pool.acquire() as first, pool.acquire() as second:
            assert first.server is second.server is pool.members[0]
        await pool.aclose()

    asyncio.run(change())
