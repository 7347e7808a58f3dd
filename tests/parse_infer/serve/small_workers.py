"""What workers run in tests, in a module that imports fast: each worker imports it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def answer_pid(listening: socket.socket, on_start: Callable[[str], None]) -> None:
    """A server that sends its process id to each client."""
    on_start("pids")
    while True:
        with listening.accept()[0] as client:
            client.sendall(str(os.getpid()).encode())


def fail(listening: socket.socket, on_start: Callable[[str], None]) -> None:
    raise ConnectionError("no server of the target answers")
