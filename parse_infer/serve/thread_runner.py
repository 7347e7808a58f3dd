"""Runner over the local backend: one thread owns the engine and answers one job at a time."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from parse_infer.backends.local.backend import LocalBackend
from parse_infer.engine import ParseEngine
from parse_infer.request.events import Done, Event, Interrupted
from parse_infer.serve.runner import InvalidRequest, Job, Moment, Runner


class ThreadRunner(Runner):
    """Has exclusive use of one `ParseEngine`.

    Args:
        engine: the engine, or a function that loads it in the worker thread. OpenMP keeps a thread pool for each
            thread that computes, and more OpenMP threads than cores slow all of them down.

    Attributes:
        parallel: 1: the engine answers one request at a time.
    """

    parallel = 1

    def __init__(self, engine: ParseEngine | Callable[[], ParseEngine]) -> None:
        self._runs: queue.SimpleQueue[_Run | Callable[[], None] | None] = queue.SimpleQueue()
        self._running = 0
        loaded: Future[ParseEngine] = Future()
        Thread(target=self._work, args=(engine, loaded), name="parse-engine", daemon=True).start()
        self._engine = loaded.result()
        if not isinstance(self._engine.backend, LocalBackend):
            raise TypeError(f"the engine has a {type(self._engine.backend).__name__}: give one with local models")
        self._backend = self._engine.backend
        super().__init__(self._engine.target, self._engine.draft)
        self.threshold = self._engine.threshold
        self.calibrations = self._engine.calibrations

    @property
    def running(self) -> int:
        return self._running

    def check_calibrations(self) -> None:
        done: Future[None] = Future()

        def check() -> None:
            try:
                self._engine.check_calibrations()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._runs.put(check)  # the check reads the engine's weights
        done.result()

    async def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        run = _Run(job, asyncio.get_running_loop())
        self._runs.put(run)
        try:
            while True:
                what = await run.inbox.get()
                if isinstance(what, BaseException):
                    raise what
                yield what
                if isinstance(what.event, Done):
                    return
        finally:
            run.unwanted = True

    def close(self) -> None:
        """Accept no more jobs; the thread ends after its queued jobs."""
        self._runs.put(None)
        super().close()

    def _work(self, engine: ParseEngine | Callable[[], ParseEngine], loaded: Future[ParseEngine]) -> None:
        try:
            loaded.set_result(engine if isinstance(engine, ParseEngine) else engine())
        except BaseException as error:
            loaded.set_exception(error)
            return
        while (run := self._runs.get()) is not None:
            if not isinstance(run, _Run):
                run()
                continue
            if run.unwanted:
                continue
            self._running = 0 if run.job.audit else 1
            try:
                with self._backend.cancellable(lambda run=run: run.unwanted):  # type: ignore[misc]
                    for event in self._events(run.job):
                        run.post(Moment(event, time.perf_counter()), now=run.job.streamed)
                run.post()
            except Interrupted:
                pass
            except BaseException as error:  # report it and go on with the next job
                run.post(error)
            finally:
                self._running = 0

    def _events(self, job: Job) -> Iterator[Event]:
        try:
            if job.alone:
                return self._engine.stream_target(job.prompt, job.settings)
            return self._engine.stream(job.prompt, job.settings, job.draft_text, streamed=job.streamed)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


class _Run:
    """A job in the worker thread; `inbox` belongs to the event loop.

    Posts wake the loop as seldom as possible: with few cores, each wake-up costs the model's threads milliseconds.
    """

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.unwanted = False
        self.inbox: asyncio.Queue[Moment | BaseException] = asyncio.Queue()
        self._loop = loop
        self._posted: deque[Moment | BaseException] = deque()
        self._woken = False

    def post(self, *what: Moment | BaseException, now: bool = True) -> None:
        """Post from the worker thread. `now`: deliver all posts so far."""
        self._posted.extend(what)
        if now and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # reset before reading, so that later posts wake the loop again
        while self._posted:
            self.inbox.put_nowait(self._posted.popleft())
