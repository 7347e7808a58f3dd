"""Open-loop load on a server: requests arrive at random, whether earlier ones are answered or not.

Clients in a closed loop wait for a slow server, and so hide how long others would have waited. Here times count from
the moment at which a request was due, so that a late sender hides nothing either.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from parse_infer.evaluation.load_test import percentiles

CHAT = "/v1/chat/completions"
LIMIT_S = 600.0  # of one answer


@dataclass
class Point:
    """What one arrival rate gave. Times are in seconds.

    Attributes:
        failures: by kind: a status, "error" (an error event), "broken" (the stream ended early) or "unreachable".
    """

    rate: float
    wall_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0
    """By how much the latest request was sent too late."""

    def __str__(self) -> str:
        failed = ", ".join(f"{n} x {kind}" for kind, n in sorted(self.failures.items())) or "none"
        figures = "no answer"
        if self.all_s:
            answer, first = percentiles("", self.all_s), percentiles("", self.first_s)
            figures = (
                f"{len(self.all_s) / self.wall_s:.2f} answers/s of {self.rate:g} arriving; answer p50 "
                f"{answer['p50_s']:.3f} s, p99 {answer['p99_s']:.3f} s; first text p50 {first['p50_s']:.3f} s, "
                f"p99 {first['p99_s']:.3f} s"
            )
        return f"{figures}; failures: {failed}; sent at most {1000 * self.late_s:.0f} ms late"


def arrivals(rate: float, n: int, seed: int = 0) -> list[float]:
    """Times of `n` requests that arrive independently (Poisson), in seconds from the start."""
    gaps = random.Random(seed)
    return list(accumulate(gaps.expovariate(rate) for _ in range(n)))


def open_load(url: str, rate: float, bodies: Sequence[dict[str, Any]], seed: int = 0) -> Point:
    """Send each body as a streamed chat request, at `rate` per second in the mean."""
    return asyncio.run(_open_load(url, Point(rate), bodies, arrivals(rate, len(bodies), seed)))


async def _open_load(url: str, point: Point, bodies: Sequence[dict[str, Any]], due: Sequence[float]) -> Point:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
        start = time.perf_counter() + 0.1

        async def request(body: dict[str, Any], at: float) -> None:
            await asyncio.sleep(start + at - time.perf_counter())
            point.late_s = max(point.late_s, time.perf_counter() - start - at)
            texts: list[float] = []
            kind = await _answer(client, url, body, lambda: texts.append(time.perf_counter() - start - at))
            if kind is not None:
                point.failures[kind] += 1
                return
            point.all_s.append(time.perf_counter() - start - at)
            point.first_s.append((texts or point.all_s[-1:])[0])

        await asyncio.gather(*map(request, bodies, due))
        point.wall_s = time.perf_counter() - start
    return point


async def _answer(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], on_text: Callable[[], None]
) -> str | None:
    """Read one answer; returns the kind of its failure."""
    try:
        async with client.stream("POST", url + CHAT, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return None
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return "error"
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    on_text()
        return "broken"
    except httpx.ConnectError:
        return "unreachable"
    except httpx.HTTPError:
        return "broken"
