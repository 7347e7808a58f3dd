"""Load of servers: our own requests, and those of other clients, by the servers' own metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from parse_infer.backends.pool.client import Client, TransientServerError
from parse_infer.backends.pool.health import Replica

EVERY_S = 1.0
RETRY_EVERY_S = 60.0  # where a server exposes no metrics
_LIMIT_S = 2.0  # timeout of a request for metrics
_LAST = 0.5  # weight of the last measurement in the average


class ServerLoad:
    """Number of requests on each server of a model.

    It asks a server only while requests come, and in the background: a request uses what is known.

    Args:
        clock: returns seconds.
    """

    def __init__(
        self, members: Sequence[Replica], client: Client, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._members, self._client, self._clock = members, client, clock
        self._due: dict[Replica, float] = {}
        self._others: dict[Replica, float] = {}
        self._task: asyncio.Task[None] | None = None

    def of(self, running: int) -> int:
        """Requests on a server, at least 1, if `running` of ours are spread over the healthy servers.

        The other clients' requests are added if the servers expose metrics. Ours count wherever they are now, also
        while the draft model writes: else the load would depend on whether answers have a draft.
        """
        healthy = [server for server in self._members if server.healthy] or list(self._members)
        if self._task is None or self._task.done():
            due = [server for server in healthy if self._due.get(server, 0.0) <= self._clock()]
            if any(server.dialect.load_metrics for server in due):
                self._task = asyncio.get_running_loop().create_task(self._measure(due))
        others = sum(self._others.get(server, 0.0) for server in healthy)
        return max(1, round((running + others) / len(healthy)))

    def close(self) -> None:
        """Stop a measurement. A later one may run in another event loop."""
        if self._task is not None:
            with suppress(RuntimeError):  # its event loop has ended
                self._task.cancel()
        self._task = None

    async def _measure(self, servers: Sequence[Replica]) -> None:
        self._due = {server: at for server, at in self._due.items() if server in self._members}
        self._others = {server: n for server, n in self._others.items() if server in self._members}
        await asyncio.gather(*map(self._measure_one, servers))

    async def _measure_one(self, server: Replica) -> None:
        ours = server.requests
        try:
            async with asyncio.timeout(_LIMIT_S):
                text = await self._client.text(f"{server.url}/metrics")
            total = sum_of(text, server.dialect.load_metrics)
        except (TimeoutError, TransientServerError, ValueError):  # also rejections, and numbers that are none
            total = None
        self._due[server] = self._clock() + (RETRY_EVERY_S if total is None else EVERY_S)
        if total is None:
            self._others.pop(server, None)
            return
        others = max(0.0, total - max(ours, server.requests))  # some of ours may have come or gone since
        self._others[server] = (1 - _LAST) * self._others.get(server, others) + _LAST * others


def sum_of(text: str, names: Sequence[str]) -> float | None:
    """Sum gauges in Prometheus' text format over all labels; None without any."""
    if not names:
        return None
    pattern = rf"^(?:{'|'.join(map(re.escape, names))})(?:\{{.*\}})? ([0-9.eE+]+)"
    found = re.findall(pattern, text, re.MULTILINE)
    return sum(map(float, found)) if found else None
