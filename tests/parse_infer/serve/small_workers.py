"""What processes run in tests, in a module that imports fast: each of them imports it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence


def answer_pid(listening: socket.socket, on_start: Callable[[str], None]) -> None:
    """A server that sends its process id to each client."""
    on_start("pids")
    while True:
        with listening.accept()[0] as client:
            client.sendall(str(os.getpid()).encode())


def fail(listening: socket.socket, on_start: Callable[[str], None]) -> None:
    raise ConnectionError("no server of the target answers")


def run_command(words: Sequence[str], log: str, on_start: Callable[[], None] = lambda: None) -> None:
    """`parse-infer` with these words, which writes to the file `log`, and looks for new servers all the time."""
    on_start()
    from parse_infer.backends.pool import discovery
    from parse_infer.cli.app import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    discovery.EVERY_S = 0.2
    sys.exit(main(words))
