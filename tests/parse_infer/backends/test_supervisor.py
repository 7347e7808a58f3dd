"""Servers of our own come up, come back and go, with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parse_infer.backends.launch.supervisor import Supervisor

# Like a server of vLLM: it answers /health, and a process that it has started does the work.
SERVER = """
import http.server, pathlib, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).open("a").write(f"{worker.pid}\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def soon(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def workers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_a_dead_server_restarts_at_its_address_and_stop_ends_all_processes(tmp_path):
    progress: list[str] = []
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    servers = Supervisor([("target", command, {}), ("draft", command, {})], progress.append, tmp_path / "logs")
    servers.start()
    (process, _), urls = servers.members, servers.urls("target")
    assert len(workers(tmp_path / "pids")) == 2
    assert soon(process.answers)
    killed = process.guard.pid
    os.killpg(killed, signal.SIGKILL)
    assert soon(lambda: process.guard.pid != killed and process.answers())
    assert servers.urls("target") == urls and progress[-1] == "the target server died; restarting it"
    assert servers.failure() is None
    servers.stop()
    assert len(workers(tmp_path / "pids")) == 3
    assert soon(lambda: not any(map(running, workers(tmp_path / "pids"))))
    assert not process.alive and not process.answers()


def test_servers_end_with_a_process_that_is_killed(tmp_path):
    code = f"""
import sys, time
from parse_infer.backends.launch.supervisor import Supervisor
Supervisor([("target", [sys.executable, "-c", {SERVER!r}, {str(tmp_path / "pids")!r}], {{}})]).start()
print("ready", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert owner.stdout.readline() == b"ready\n"
    owner.kill()
    owner.wait()
    assert soon(lambda: not any(map(running, workers(tmp_path / "pids"))))


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported_with_its_log(tmp_path):
    fails = [sys.executable, "-c", "raise MemoryError('no room for the cache')"]
    lasts = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    servers = Supervisor([("draft", lasts, {}), ("target", fails, {})], logs=tmp_path / "logs")
    with pytest.raises(OSError, match=r"the target server ended before it was ready: MemoryError: no room .*log"):
        servers.start()
    assert soon(lambda: not any(map(running, workers(tmp_path / "pids"))))
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "target-0.log").write_text("loading\n")  # a server may take longer to write its first line
    with pytest.raises(OSError, match=r"the target server is not ready after \d+ s: loading"):
        Supervisor([("target", sleeps, {})], logs=tmp_path / "slow").start(ready_s=1)


def test_its_thread_ends_before_the_servers_are_stopped(tmp_path, monkeypatch):
    """Else it could restart a server meanwhile."""

    def supervise(servers):
        servers._stopping.wait()
        time.sleep(0.3)

    monkeypatch.setattr(Supervisor, "_supervise", supervise)
    servers = Supervisor([], logs=tmp_path)
    servers.start()
    servers.stop()
    assert not servers._supervisor.is_alive()


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("parse_infer.backends.launch.supervisor._RESTARTS", 1)
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    servers = Supervisor([("draft", command, {})], logs=tmp_path / "logs")
    servers.start()
    (process,) = servers.members
    for _ in range(2):
        assert soon(process.answers)
        os.killpg(process.guard.pid, signal.SIGKILL)
        assert soon(lambda: not process.answers() or process.alive)
    assert soon(lambda: servers.failure() is not None)
    assert "the draft server died 2 times" in servers.failure()
    servers.stop()


@pytest.mark.slow
def test_a_proxy_does_not_hide_our_own_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    servers = Supervisor([("target", command, {})], logs=tmp_path / "logs")
    servers.start(ready_s=60)
    assert servers.members[0].answers()
    servers.stop()
