"""Worker processes that answer on one listening socket; one that dies is started again.

uvicorn's own supervisor wants an application that can be pickled, and has another interface in each version.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from parse_infer.errors import ParseError, ServerError

log = logging.getLogger("parse_infer.serve")

Serve = Callable[[socket.socket, Callable[[str], None]], None]
"""What a worker runs: `serve(listening, on_start)` calls `on_start` with the model's name once it answers."""
_PULSE_S = 0.25
_LONGEST_PAUSE_S = 60.0
_MARGIN_S = 10.0  # for a worker's own shutdown after its grace period
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class _Worker:
    """A process, and what it has reported.

    Attributes:
        model: name of the model, once the worker answers.
        error: what ended it.
    """

    process: SpawnProcess
    messages: Connection
    model: str | None = None
    error: Exception | None = None

    def has_ended(self) -> bool:
        """Whether the process has ended; reads its messages first."""
        alive = self.process.is_alive()
        try:
            while self.messages.poll():
                found = self.messages.recv()
                if isinstance(found, Exception):
                    self.error = found
                else:
                    self.model = found
        except (EOFError, OSError):  # the process has closed the pipe
            pass
        return not alive


@dataclass
class Workers:
    """Runs `n` workers until a stop signal, and lets them finish their requests then.

    Args:
        serve: can be pickled.
        grace_s: seconds that a worker's requests have after the signal.
        on_end: called with the process id of each worker that has ended.
    """

    n: int
    serve: Serve
    listening: socket.socket
    grace_s: float
    on_end: Callable[[int], None] = lambda pid: None
    _stopping: bool = False

    def run(self, on_start: Callable[[str], None]) -> None:
        """Call `on_start` with the model's name when all workers answer, and return after a stop signal.

        Raises the error of a worker that cannot start at first. Later ones are started again, after longer pauses.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would compete with the other workers
        with self._signals():
            workers = [self._start() for _ in range(self.n)]
            try:
                while not self._stopping and not all(worker.model for worker in workers):
                    self._pause(workers)
                    self._check_first_start(workers)
                if not self._stopping:
                    on_start(workers[0].model or "")
                self._supervise(workers)
            finally:
                self._stop(workers)

    def _supervise(self, workers: list[_Worker]) -> None:
        """Start workers again that have ended."""
        failures, restart_at = [0] * self.n, [0.0] * self.n
        while not self._stopping:
            self._pause(workers)
            for i, worker in enumerate(workers):
                ended = worker.has_ended()
                if worker.model is not None:
                    failures[i] = 0
                if not ended:
                    continue
                if not restart_at[i]:
                    pause_s = min(2.0 ** failures[i] - 1, _LONGEST_PAUSE_S)
                    restart_at[i] = time.monotonic() + pause_s
                    failures[i] += 1
                    reason = worker.error or worker.process.exitcode
                    log.error(
                        "worker %d has ended (%s); starting another in %.0f s", worker.process.pid, reason, pause_s
                    )
                    self._ended(worker)
                if time.monotonic() >= restart_at[i]:
                    workers[i], restart_at[i] = self._start(), 0.0

    def _check_first_start(self, workers: list[_Worker]) -> None:
        for worker in workers:
            ended = worker.has_ended()
            if worker.error is not None:
                raise worker.error
            if ended:
                raise ServerError(f"a worker ended ({worker.process.exitcode}) before it could answer: see the log")

    def _start(self) -> _Worker:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=_work, args=(self.serve, self.listening, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _pause(self, workers: list[_Worker]) -> None:
        """Wait for a moment, or until a worker ends."""
        if waited := [worker.process.sentinel for worker in workers if worker.process.is_alive()]:
            wait(waited, _PULSE_S)
        else:
            time.sleep(_PULSE_S)

    def _stop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.process.terminate()
        end = time.monotonic() + self.grace_s + _MARGIN_S
        for worker in workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                log.error("worker %d does not end: it is killed", worker.process.pid)
                worker.process.kill()
                worker.process.join()
            self._ended(worker)

    def _ended(self, worker: _Worker) -> None:
        worker.messages.close()
        self.on_end(worker.process.pid or 0)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(*_: object) -> None:
            self._stopping = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _work(serve: Serve, listening: socket.socket, messages: Connection) -> None:
    """A worker: serves until SIGTERM, or until its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(listening, messages.send)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        whole = isinstance(error, ModuleNotFoundError)  # others may need more than a text to be made
        messages.send(error if whole else ParseError(str(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
