"""Supervisor of the servers that PARSE starts: start, readiness, restart and shutdown."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

READY_S = 900.0
_RESTARTS = 5  # limit per server within _RESTARTS_S
_RESTARTS_S = 600.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our own servers
_ERROR = re.compile(r"\w+(?:Error|Exception): .+")


@dataclass
class Process:
    """One server process.

    Attributes:
        role: "target" or "draft", for messages.
        command: command line without `--port`.
        log: log file.
    """

    role: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    guard: subprocess.Popen[bytes] | None = None
    started: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def start(self) -> None:
        self.port = self.port or _free_port()
        words = [
            sys.executable,
            "-m",
            "parse_infer.backends.launch.parent_death_watchdog",
            *self.command,
            "--port",
            str(self.port),
        ]
        with self.log.open("ab") as log:
            self.guard = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                process_group=0,  # an own group for signals, but no session, to keep our priority
            )
        self.started = [at for at in self.started if at > time.monotonic() - _RESTARTS_S] + [time.monotonic()]

    def answers(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=2):
                return True
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        if self.guard is not None and self.guard.stdin is not None:
            with suppress(OSError):
                self.guard.stdin.close()

    def why(self) -> str:
        """Quote the log: the last error with the lines after it, or the last lines."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        errors = [match for match in _ERROR.finditer(text) if "root cause" not in match[0]]
        lines = text[errors[-1].start() :].splitlines()[:3] if errors else text.splitlines()[-3:]
        return f"{' | '.join(line.strip() for line in lines)[:500]} (log: {self.log})"


class Supervisor:
    """Supervises servers until `stop`, which also runs when the interpreter ends.

    Args:
        servers: role, command and environment of each server.
        on_progress: called with progress lines.
        logs: folder for logs; None: a temporary folder, kept only after a failure.

    Attributes:
        members: the server processes.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, Sequence[str], Mapping[str, str]]],
        on_progress: Callable[[str], None] = lambda line: None,
        logs: Path | None = None,
    ) -> None:
        self._temporary = logs is None
        self._logs = logs = Path(tempfile.mkdtemp(prefix="parse-servers-")) if logs is None else logs
        logs.mkdir(parents=True, exist_ok=True)
        self.members = [
            Process(role, command, logs / f"{role}-{n}.log", environment)
            for n, (role, command, environment) in enumerate(servers)
        ]
        self._on_progress = on_progress
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        atexit.register(self.stop)

    def start(self, ready_s: float = READY_S) -> None:
        """Start all servers and wait until they answer.

        Raises:
            OSError: a server ended or is not ready after `ready_s`; all servers are stopped, and the message quotes
                the log.
        """
        begun = time.monotonic()
        try:
            for process in self.members:
                process.start()
            waiting = list(self.members)
            while waiting:
                waiting = [process for process in waiting if not process.answers()]
                for process in waiting:
                    self._check(process, time.monotonic() - begun, ready_s)
                if waiting:
                    names = ", ".join(process.role for process in waiting)
                    self._on_progress(f"starting vLLM: {names} ({time.monotonic() - begun:.0f} s)")
                    time.sleep(0.5)
        except BaseException as error:
            self._temporary = self._temporary and not isinstance(error, OSError)  # the message names a log
            self.stop()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="parse-servers", daemon=True)
        self._supervisor.start()

    def urls(self, role: str) -> list[str]:
        return [process.url for process in self.members if process.role == role]

    def failure(self) -> str | None:
        """Why a server cannot recover; None while all may."""
        return self._failure

    def stop(self) -> None:
        """Stop all servers and wait for their end."""
        self._stopping.set()
        atexit.unregister(self.stop)
        if self._supervisor not in (None, threading.current_thread()):
            self._supervisor.join()  # else it could restart a server that ends here
        for process in self.members:
            process.stop()
        for process in self.members:
            if process.guard is not None:
                process.guard.wait()
        if self._temporary and self._failure is None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _check(self, process: Process, seconds: float, ready_s: float) -> None:
        if not process.alive:
            why = process.why()
            if "address already in use" in why.lower() and len(process.started) < 3:  # another process took the port
                process.port = 0
                process.start()
                return
            raise OSError(f"the {process.role} server ended before it was ready: {why}")
        if seconds > ready_s:
            raise OSError(f"the {process.role} server is not ready after {seconds:.0f} s: {process.why()}")

    def _supervise(self) -> None:
        while not self._stopping.wait(0.5):
            for process in self.members:
                if process.alive or self._stopping.is_set():
                    continue
                if len(process.started) > _RESTARTS:
                    self._failure = f"the {process.role} server died {len(process.started)} times: {process.why()}"
                    continue
                self._on_progress(f"the {process.role} server died; restarting it")
                process.start()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
