"""Measure the server on an idle machine: `python -m tools.measure_serving [row …] [--url URL] [--rate N …]`.

Starts `parse-infer serve` on the embedded models for each row, and prints one line per row:

identical   equality with `ParseEngine.generate` for 100 prompts, streamed or not, 1 and 16 clients
latency     latency added to `ParseEngine.generate` in this process, for 100 prompts of one client
bad         statuses of 1,000 bad requests, and memory before and after
leaving     time until the server is idle after 200 clients disconnect early
signal      SIGTERM under load: outcome of accepted requests, and time until the process exits
open        requests that arrive at random, `--rate` per second in the mean: answers/s, times of answers and first
            texts, failures; PARSE and the target alone. `--url`: of another server
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import httpx

from data_tools.tasks.registry import load_task
from parse_infer.engine import ParseEngine
from tests.parse_infer.serve.test_faults import BAD_BODIES, BAD_FIELDS
from tools.open_load import CHAT, open_load

TOKENS = 200
ANSWERS = 300  # of a point of the open loop


@contextmanager
def server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "parse_infer", "serve", "--port", "0", "--max-waiting", "400", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found, "the server has not started"
    try:
        yield found[0], process
    finally:
        process.kill()
        process.wait()


def prompts(n: int) -> list[Any]:
    return [problem.prompt for problem in load_task("gsm_symbolic").problems("test", seed=11, limit=n)]


def messages(prompt: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def ask(url: str, prompt: Any, stream: bool = False, **fields: Any) -> str:
    body = {"messages": messages(prompt), "max_tokens": TOKENS, "stream": stream, **fields}
    response = httpx.post(url + CHAT, json=body, timeout=600)
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(url + "/metrics", timeout=60).text, re.MULTILINE)
    assert found
    return float(found[1])


def identical() -> str:
    sent = prompts(100)
    engine = ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", device="cpu", dtype="float32")
    own = [engine.generate(prompt, max_new_tokens=TOKENS).text for prompt in sent]
    same = {}
    with server("--device", "cpu", "--dtype", "float32") as (url, _):
        for clients in (1, 16):
            for stream in (False, True):
                with ThreadPoolExecutor(clients) as pool:
                    texts = list(pool.map(lambda prompt, stream=stream: ask(url, prompt, stream), sent))
                same[f"{clients} clients, stream {stream}"] = sum(a == b for a, b in zip(texts, own, strict=True))
    return f"of {len(sent)} texts the same: {same}"


def latency() -> str:
    """Measure the engine before the server starts, because idle server threads would slow down the engine."""
    engine = ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter")
    sent = prompts(105)
    own = [seconds(lambda prompt=prompt: engine.generate(prompt, max_new_tokens=TOKENS)) for prompt in sent]
    with server() as (url, _), httpx.Client(timeout=600) as client:
        bodies = [{"messages": messages(prompt), "max_tokens": TOKENS} for prompt in sent]
        served = [seconds(lambda body=body: client.post(url + CHAT, json=body).json()) for body in bodies]
    added = sorted(1000 * (b - a) for a, b in zip(own[5:], served[5:], strict=True))
    return f"added: median {added[50]:.2f} ms, quartiles {added[25]:.2f} to {added[75]:.2f} ms"


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bad() -> str:
    def memory(process: subprocess.Popen[str]) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        assert found
        return int(found[1]) // 1024

    cases, random, counts, sizes = [*BAD_BODIES, *BAD_FIELDS], Random(0), Counter[int](), []
    with server() as (url, process):
        for i in range(1000):
            path, body, _ = cases[i % len(cases)]
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            if i >= len(cases):  # damage a random position
                at = random.randrange(len(raw) + 1)
                raw = raw[:at] + random.randbytes(2) + raw[at + 1 :]
            kind = {"Content-Type": "application/json"}
            counts[httpx.post(url + path, content=raw, headers=kind, timeout=600).status_code] += 1
            if i in (99, 999):
                sizes.append(memory(process))
        healthy = httpx.get(url + "/health").status_code
    return f"statuses {dict(counts)}, then /health {healthy}; {sizes[0]} MB after 100, {sizes[1]} MB after 1,000"


def leaving() -> str:
    def leave(i: int) -> None:
        body = {"messages": messages(sent[i % len(sent)]), "stream": i % 2 == 0, "parse": {"mode": "target"}}
        try:
            with httpx.stream("POST", url + CHAT, json=body, timeout=600 if i % 10 == 0 else 0.5) as response:
                next(response.iter_lines())
        except httpx.TimeoutException:
            pass

    sent = prompts(20)
    with server() as (url, _):
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(leave, range(200)))
        begin = time.perf_counter()
        while metric(url, "parse_answers_running") + metric(url, "parse_answers_waiting"):
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        text = ask(url, sent[0])
    return f"idle {seconds:.2f} s after the last of 200 clients left; then an answer of {len(text)} characters"


def signal() -> str:
    ends: Counter[str] = Counter()

    def load(i: int) -> None:
        body = {"messages": messages(sent[i]), "stream": i % 2 == 0, "parse": {"mode": "target"}}
        try:
            text = httpx.post(url + CHAT, json=body, timeout=600).text
            ends["error" if '"stopping"' in text else "answer" if '"finish_reason":"' in text else "neither"] += 1
        except httpx.ConnectError:
            ends["not accepted any more"] += 1
        except httpx.HTTPError:
            ends["broken"] += 1

    sent, grace = prompts(40), 2
    with server("--grace", str(grace)) as (url, process):
        threads = [threading.Thread(target=load, args=(i,)) for i in range(len(sent))]
        for thread in threads:
            thread.start()
        while metric(url, "parse_answers_waiting") < len(sent) - 10:
            time.sleep(0.01)
        process.terminate()
        begin = time.perf_counter()
        process.wait()
        seconds = time.perf_counter() - begin
        for thread in threads:
            thread.join()
    return f"{dict(ends)}; exited after {seconds:.2f} s, with a grace period of {grace} s"


def open_loop(url: str | None, rates: Sequence[float]) -> Iterator[str]:
    """Yield a line for each rate and way to answer, which take turns."""
    sent = prompts(ANSWERS)
    with nullcontext((url, None)) if url else server("--max-waiting", str(ANSWERS)) as (address, _):
        ask(address, sent[0])  # warms up
        for rate in rates:
            for mode in ("target", "parse"):
                own = {"parse": {"mode": "target"}} if mode == "target" else {}
                bodies = [{"messages": messages(prompt), "max_tokens": TOKENS, **own} for prompt in sent]
                yield f"{mode}: {open_load(address, rate, bodies)}"


ROWS = {row.__name__: row for row in (identical, latency, bad, leaving, signal)}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tools.measure_serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, "open"], default=list(ROWS))
    parser.add_argument("--url", help="of a server to load with `open`; default: one of the embedded models")
    parser.add_argument("--rate", type=float, action="append", help="arrivals per second; default: 1, 2 and 4")
    given = parser.parse_args(words)
    for rate in given.rate or ():
        if not 0 < rate < float("inf"):
            parser.error(f"--rate is {rate:g}; give a number of arrivals per second above 0")
    for name in given.rows:
        for line in open_loop(given.url, given.rate or (1.0, 2.0, 4.0)) if name == "open" else (ROWS[name](),):
            print(f"{name:10} {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
