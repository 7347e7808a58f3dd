"""Hostile clients of a server in a process of its own: an answer to each request, no error of ours, /health in time,
and memory that stays.

`PARSE_REQUESTS` sets the number of requests drawn from the OpenAPI document. A fifth as many are mutations, and a
tenth as many connections stay half open. Times and memory are checked from 10000 on, on a machine that does nothing
else; smaller runs print them. Over vLLM's servers, which are imitated, the runs are always small.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from aiohttp import web

from parse_infer.models.loading import load_language_model
from tests.parse_infer.backends.fake_server import FakeServer, serving
from tests.parse_infer.serve.bad_requests import CHAT, GOOD, PLAIN, from_document, message, mutated

SMALL, FULL = 300, 10_000
N = int(os.environ.get("PARSE_REQUESTS", SMALL))
HEALTH_S = 0.2  # beyond what an empty server beside it takes on a busy machine
GROWTH = 1.02  # of memory, after a fifth of the requests
LIMIT_S = 20.0  # of a response: some headers promise more than comes, and long answers wait for others
BODY = 4_000_000  # bytes, the default limit
CONTROL = """
import asyncio
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
PROBE = """
import http.client, sys, threading, time
stop, times = threading.Event(), []
def probe():
    while not stop.is_set():
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append(time.perf_counter() - begun)
        time.sleep(0.05)
thread = threading.Thread(target=probe)
thread.start()
sys.stdin.read()
stop.set()
thread.join()
print(max(times), len(times))
"""


class CheckingServer(FakeServer):
    """Answers 400 to what it cannot read, as vLLM does."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().completions(request)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            return web.json_response({"error": {"message": type(error).__name__}}, status=400)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().chat(request)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            return web.json_response({"error": {"message": type(error).__name__}}, status=400)


class Server:
    """
    Args:
        n: number of requests drawn from the document.
    """

    def __init__(self, port: int, process: subprocess.Popen[str], n: int) -> None:
        self.port, self.process, self.n, self.statuses = port, process, n, Counter[int]()

    @property
    def full(self) -> bool:
        return self.n >= FULL

    def send(self, raw: bytes) -> int:
        """Status of the response; 0: none came."""
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S) as connection:
                connection.sendall(raw)
                while piece := connection.recv(1 << 16):
                    answer += piece
        except (ConnectionError, TimeoutError):
            pass
        found = re.match(rb"HTTP/1.1 (?:100 Continue\r\n\r\nHTTP/1.1 )?(\d+)", answer)
        status = int(found[1]) if found else 0
        if not status and b"\r\nTransfer-Encoding: chunked\r\n" in raw:
            return status  # the body has no end, for which the server waits
        if not 0 < status < 500 or b'"internal_error"' in answer:
            print(status, raw[:2000], answer[-500:])
        self.statuses[500 if b'"internal_error"' in answer else status] += 1
        return status

    @property
    def memory(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ask for /health all through the block, and check after it that all requests were answered."""
        control = subprocess.Popen([sys.executable, "-c", CONTROL], stdout=subprocess.PIPE, text=True)
        assert control.stdout is not None
        probes = [
            subprocess.Popen(
                [sys.executable, "-c", PROBE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for port in (self.port, int(control.stdout.readline()))
        ]
        try:
            yield
        finally:
            health, machine = (float(probe.communicate("")[0].split()[0]) for probe in probes)
            control.kill()
        print(f"{dict(self.statuses)}; /health {1000 * health:.0f} ms, the machine {1000 * machine:.0f} ms", end="; ")
        assert not [status for status in self.statuses if not 0 < status < 500], self.statuses
        assert not self.full or health - machine < HEALTH_S

    def all(self, requests: Callable[[int], bytes], n: int) -> None:
        with self.watched(), ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: self.send(requests(i)), range(n // 5)))
            before = self.memory
            list(pool.map(lambda i: self.send(requests(i)), range(n // 5, n)))
            after = self.memory
        self.check_memory(before, after)

    def check_memory(self, before: int, after: int) -> None:
        print(f"memory {before // 1024} MB, then {after // 1024} MB")
        assert not self.full or after < GROWTH * before


@pytest.fixture(scope="module", params=["local", "vllm"])
def server(folders, request) -> Iterator[Server]:
    words = ["serve", "--port", "0", "--no-generation-config", "--max-waiting", "400"]
    with ExitStack() as stack:
        if request.param == "local":
            words += [*folders, "--device", "cpu"]
        else:
            words += ["--backend", "vllm", "--judge", "min_p", *folders[:4]]
            for role, folder in (("target", folders[1]), ("draft", folders[3])):
                own = stack.enter_context(serving(CheckingServer(load_language_model(folder, role="target"))))
                words += [f"--{role}-url", own.url]
        process = subprocess.Popen(
            [sys.executable, "-m", "parse_infer", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found
        yield Server(int(found[1]), process, N if request.param == "local" else min(N, SMALL))


@pytest.fixture(autouse=True)
def _counts_anew(server) -> None:
    server.statuses.clear()
    for path, body in GOOD:
        assert httpx.post(f"http://127.0.0.1:{server.port}{path}", json=body, timeout=60).status_code == 200


@pytest.mark.slow
def test_requests_from_the_document(server):
    document = httpx.get(f"http://127.0.0.1:{server.port}/openapi.json").json()

    def request(i: int) -> bytes:
        path, body = from_document(document, Random(i))
        return message(path, body, {"Content-Type": "application/json"})

    server.all(request, server.n)
    assert server.statuses[200] > server.n / 50 and server.statuses[400] > server.n / 10


@pytest.mark.slow
def test_damaged_requests(server):
    def request(i: int) -> bytes:
        path, body, headers = mutated(Random(i))
        return message("/v1/embeddings" if i % 5 == 0 else path, body, headers)  # which only servers may have

    server.all(request, server.n // 5)
    assert server.statuses[400] > server.n / 20


def at_the_limit(i: int) -> bytes:
    """A body of the largest size, or one byte more."""
    over, kind = i % 4 == 3, i % 3
    if kind == 0:
        body = {"messages": [{"role": "user", "content": "X"}], "max_tokens": 1}
    elif kind == 1:
        body = {"prompt": "X", "max_tokens": 1}
    else:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "metadata": {"a": "X"}}
    raw = json.dumps(body).encode()
    raw = raw.replace(b'"X"', b'"' + b"x" * (BODY - len(raw) + 1 + over) + b'"')
    if kind == 1 and not over:
        raw = b'{"max_tokens": 1, "prompt": [' + b"65," * ((BODY - 40) // 3) + b"65]}"
    return message(PLAIN if kind == 1 else CHAT, raw, {"Content-Type": "application/json"})


@pytest.mark.slow
def test_the_largest_bodies(server):
    server.all(at_the_limit, max(20, server.n // 100))
    assert server.statuses[413] and server.statuses[400] and server.statuses[200], server.statuses


@pytest.mark.slow
def test_connections_that_stay_half_open(server):
    n = max(50, server.n // 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(n + 500, hard)), hard))
    raw = message(*GOOD[0][:1], json.dumps(GOOD[0][1]).encode(), {"Content-Type": "application/json"})
    random, open_ones = Random(0), list[socket.socket]()
    try:
        before = server.memory
        with server.watched():
            for _ in range(n):
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
                connection.sendall(raw[: random.randrange(len(raw))])
                open_ones.append(connection)
                time.sleep(0.002)  # a burst is a queue in the kernel, behind which /health waits its turn
            time.sleep(2)
            assert all(server.send(raw) == 200 for _ in range(20)), "others are served meanwhile"
            for connection in open_ones:
                connection.close()
                time.sleep(0.002)
        print(f"{n} half open", end="; ")
        server.check_memory(before, server.memory)
    finally:
        for connection in open_ones:
            connection.close()
    assert server.send(raw) == 200
