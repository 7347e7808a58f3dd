"""The server process: listening socket, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from parse_infer.errors import ParseError
from parse_infer.serve.admission import Limits
from parse_infer.serve.logs import log_settings


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ValueError with one sentence on failure."""
    try:
        # proto is explicit: asyncio turns Nagle's delay (40 ms) off only for sockets marked as TCP.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ParseError(f"port {port} of {host} is in use: choose another one with --port") from error
        raise ParseError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listening


class Server(uvicorn.Server):
    """Serves `app` until a signal. Accepted requests then complete, or get an error after the grace period."""

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=log_settings(),
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=75,  # proxies reuse idle connections for 60 s; a request into a closed one fails
                timeout_graceful_shutdown=math.ceil(limits.grace_s) + 2,  # later than our own limit
            )
        )
        self._line = app.state.line
        self._limits = limits

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again: SIGTERM would skip the caller's cleanup."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._line.close()
        end = asyncio.get_running_loop().call_later(self._limits.grace_s, self._line.abort)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
