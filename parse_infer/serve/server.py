"""The server process: listening socket, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import resource
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from parse_infer.errors import ParseError
from parse_infer.serve.admission import Limits
from parse_infer.serve.logs import log_settings

_DESCRIPTORS = 65_536
_WAITING_CONNECTIONS = 2048  # in the kernel
_ACCEPTED_AT_ONCE = 64  # between other work of the event loop
_LAG_EVERY_S = 0.25


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ValueError with one sentence on failure."""
    try:
        # proto is explicit: asyncio turns Nagle's delay (40 ms) off only for sockets marked as TCP.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = addresses[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ParseError(f"port {port} of {host} is in use: choose another one with --port") from error
        raise ParseError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listening


def _connections() -> int:
    """Raise the soft limit of file descriptors, and return the number of connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return max(64, (_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) * 3 // 4)


def freeze_heap() -> None:
    """Leave what exists now out of later garbage collections: walking the models' objects stops the event loop."""
    gc.collect()
    gc.freeze()


async def close_stuck(connections: Collection[Any], seconds: float) -> None:
    """Close connections that have sent no whole request, or not read the rest, for so many seconds, until cancelled.

    uvicorn's time limit counts only after a response, and its closing waits for the client to read.

    Args:
        connections: uvicorn's protocols.
    """
    loop, since = asyncio.get_running_loop(), dict[Any, float]()
    while True:
        await asyncio.sleep(seconds / 10)
        since = {each: since.get(each, loop.time()) for each in connections if _is_stuck(each)}
        for each, start in since.items():
            if loop.time() - start > seconds and each.transport is not None:
                each.transport.abort()


def _is_stuck(connection: Any) -> bool:
    """Whether a client still has to send a request or its rest, or to read the rest before the connection ends."""
    cycle = connection.cycle
    if cycle is None or connection.transport.is_closing():
        return True
    return connection.timeout_keep_alive_task is None if cycle.response_complete else bool(cycle.more_body)


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Call `observe` with the seconds by which each of many timers is late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        observe(max(0.0, loop.time() - due))


class ApiServer(uvicorn.Server):
    """Serves `app` until a signal. Accepted requests then complete, or get an error after the grace period.

    Args:
        on_start: called once the server answers.
    """

    def __init__(self, app: FastAPI, limits: Limits, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=log_settings(),
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=_connections(),
                backlog=_ACCEPTED_AT_ONCE,
                timeout_keep_alive=75,  # proxies reuse idle connections for 60 s; a request into a closed one fails
                timeout_graceful_shutdown=math.ceil(limits.grace_s) + 2,  # later than our own limit
            )
        )
        self._queue, self._metrics = app.state.queue, app.state.metrics
        self._limits = limits
        self._on_start = on_start

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again: SIGTERM would skip the caller's cleanup."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        freeze_heap()
        stuck = close_stuck(self.server_state.connections, self._limits.send_s)
        lag = measure_lag(self._metrics.tick)
        self._watching = [asyncio.create_task(work) for work in (stuck, lag)]
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_WAITING_CONNECTIONS)  # asyncio has shortened the queue to what it accepts at once
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.close()
        for task in self._watching:
            task.cancel()
        end = asyncio.get_running_loop().call_later(self._limits.grace_s, self._queue.abort)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
