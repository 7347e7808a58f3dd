"""Measure a coordinator without models: `python -m tools.measure_coordinator [STREAMS …]`.

Starts `parse-infer serve` over servers that write a fixed text at the pace of a GPU, and reads answers over this
number of concurrent streams. Prints a row per number: CPU time per answer, answers per second of CPU time, and the
delay of the event loop. The servers and the clients are two more processes: leave a core for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

TEXT = " She buys 3 more packs of 12 pencils, gives 5 of them to her brother and keeps the others for the next year."
PROMPT = "A shop sells pencils in packs. " * 6
TOKENS = 256  # of an answer
WRONG_EVERY = 24  # draft tokens
DRAFT_CHUNK = 16  # tokens, as with --stream-interval 16
DRAFT_TOKEN_S, TARGET_TOKEN_S, READ_S = 0.004, 0.015, 0.04
CACHE_BLOCK, CACHE_KEY = 16, 48  # tokens
ANSWER_S = 2.5  # how long an answer takes, about


class PacedServer:
    """A vLLM server with `ids[p % len(ids)]` as its token at place p of prompt and answer.

    Args:
        draft: write another token at every `WRONG_EVERY`th place.
        slowdown: factor of all times, as under a load that fills the GPU.
    """

    def __init__(self, ids: Sequence[int], draft: bool, slowdown: float = 1.0) -> None:
        self._ids, self._draft, self._slowdown = ids, draft, slowdown
        self._cache: dict[tuple[int, ...], list[int]] = {}

    def _token(self, place: int, draft: bool = False) -> int:
        return self._ids[(place + 7 * (draft and place % WRONG_EVERY == 0)) % len(self._ids)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            return await self._read(body["prompt"], 0)
        begin, n = len(body["prompt"]), body["max_tokens"]
        tokens = [self._token(begin + i, self._draft) for i in range(n)]
        token_s, size = (DRAFT_TOKEN_S, DRAFT_CHUNK) if self._draft else (TARGET_TOKEN_S, 1)
        if not body.get("stream"):
            await asyncio.sleep(token_s * n * self._slowdown)
            return web.json_response({"choices": [{"token_ids": tokens, "finish_reason": "length"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):  # drafts are cut off
            for at in range(0, n, size):
                piece = tokens[at : at + size]
                await asyncio.sleep(token_s * len(piece) * self._slowdown)
                end = "length" if at + size >= n else None
                choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": piece, "finish_reason": end}
                if body.get("logprobs") is not None:
                    choice["logprobs"] = {"token_logprobs": [-0.01] * len(piece)}
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request: web.Request) -> web.Response:
        ids = (await request.json())["token_ids"]
        known = self._cache.get(tuple(ids[:CACHE_KEY]), [])
        self._cache[tuple(ids[:CACHE_KEY])] = ids
        common = next(
            (i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids))
        )
        return await self._read(ids, min(common, len(ids) - 1) // CACHE_BLOCK * CACHE_BLOCK)

    async def _read(self, ids: list[int], cached: int) -> web.Response:
        await asyncio.sleep(READ_S * self._slowdown)
        entries: list[Any] = [None]
        for place in range(cached + 1, len(ids)):
            found = {self._token(place): -0.02}
            found.setdefault(ids[place], -6.0)
            entries.append({str(token): {"logprob": value} for token, value in found.items()})
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        choice = {"index": 0, "token_ids": [1], "finish_reason": "length", "prompt_logprobs": entries}
        return web.json_response({"choices": [choice], "usage": usage})

    def app(self) -> web.Application:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "paced", "max_model_len": 512, "owned_by": "vllm"}]})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=1 << 24)
        routes = {"/v1/completions": self.completions, "/inference/v1/generate": self.generate}
        app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        return app


def run_servers(ids: Sequence[int], addresses: Connection, slowdown: float = 1.0) -> None:
    async def run() -> None:
        for draft in (False, True):
            runner = web.AppRunner(PacedServer(ids, draft, slowdown).app())
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
            await site.start()
            addresses.send("http://{}:{}".format(*runner.addresses[0]))
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def coordinator(workers: int, streams: int, slowdown: float) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and its addresses for requests and metrics."""
    from parse_infer.models.loading import load_served_model

    ids = load_served_model("zoo:target").tokenizer.encode(TEXT, add_special_tokens=False)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    servers = multiprocessing.get_context("spawn").Process(
        target=run_servers, args=(ids, theirs, slowdown), daemon=True
    )
    servers.start()
    target, draft = ours.recv(), ours.recv()
    limits = ["--parallel", str(streams), "--max-waiting", str(streams), "--workers", str(workers)]
    addresses = ["--target-url", target, "--draft-url", draft, "--port", "0", "--metrics-port", "0"]
    command = [sys.executable, "-m", "parse_infer", "serve", "--backend", "vllm", "--judge", "min_p", "--no-adaptive"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([*command, *limits, *addresses], **options)
    assert process.stdout is not None
    try:
        yield process, [re.findall(r"http://[\d.:]+", process.stdout.readline())[0] for _ in range(2)]
    finally:
        process.terminate()
        process.wait()
        servers.terminate()


async def load(url: str, streams: int, begin_s: float, seconds: float, ends: Counter[str]) -> None:
    """Open this number of streams within `begin_s`, keep as many open, and count how they end."""

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number / streams * begin_s)
        while True:
            message = {"role": "user", "content": f"{time.monotonic_ns()} {PROMPT}"}
            body = {"messages": [message], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
            try:
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    text = await response.read()
                ends["answered" if response.status == 200 and b'"error"' not in text else "failed"] += 1
            except aiohttp.ClientError:
                ends["failed"] += 1

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        asks = [asyncio.create_task(ask(session, number)) for number in range(streams)]
        await asyncio.sleep(seconds)
        for each in asks:
            each.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def lags(metrics: str) -> dict[float, float]:
    """Number of timers by the upper bound of their delay."""
    families = text_string_to_metric_families(httpx.get(f"{metrics}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    found = {s.labels["le"]: s.value for s in samples if s.name == "parse_loop_lag_seconds_bucket"}
    return {float(bound): number for bound, number in found.items()}


def p99(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound below which 99 % of the delays lie."""
    counts = {bound: after[bound] - before.get(bound, 0) for bound in after}
    return next(bound for bound in sorted(counts) if counts[bound] >= 0.99 * max(counts.values()))


def measure(streams: int, workers: int, slowdown: float) -> str:
    begin_s, measure_s = 2 * ANSWER_S * slowdown, max(20.0, 2 * ANSWER_S * slowdown)
    with coordinator(workers, streams, slowdown) as (process, (url, metrics)):
        ends: Counter[str] = Counter()

        async def run() -> tuple[float, float]:
            whole = asyncio.create_task(load(url, streams, begin_s, begin_s + measure_s, ends))
            await asyncio.sleep(begin_s)
            before, cpu, lag = Counter(ends), cpu_seconds(process.pid), await asyncio.to_thread(lags, metrics)
            await whole
            used, delay = cpu_seconds(process.pid) - cpu, p99(lag, await asyncio.to_thread(lags, metrics))
            ends.subtract(before)
            return used, delay

        used, delay = asyncio.run(run())
    answers = ends["answered"]
    return (
        f"{streams:5} streams: {answers / measure_s:6.1f} answers/s, {1000 * used / max(1, answers):6.1f} ms of CPU "
        f"time an answer ({answers / used:.1f}/s a core), {used / measure_s:.2f} cores busy, event loop at most "
        f"{1000 * delay:g} ms late (p99), {ends['failed']} failed"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", type=int, nargs="*", default=[100, 250])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slowdown", type=float, default=1.0, help="Factor of the servers' times.")
    arguments = parser.parse_args()
    for given, value in (("streams", min(arguments.streams)), ("--workers", arguments.workers)):
        if value < 1:
            parser.error(f"{given} is {value}; give at least 1")
    if not 0 < arguments.slowdown < float("inf"):
        parser.error(f"--slowdown is {arguments.slowdown:g}; give a factor above 0")
    for each in arguments.streams:
        print(measure(each, arguments.workers, arguments.slowdown), flush=True)
