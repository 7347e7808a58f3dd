"""The local engine behind the server: one thread owns it, and answers one job after the other."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from parse_infer.engine import ParseEngine
from parse_infer.events import Done, Event, Interrupted
from parse_infer.serve.runner import InvalidRequest, Job, Moment
from parse_infer.serve.tokenizer_service import TokenizerService


class ThreadRunner(TokenizerService):
    """A `Runner` for one `ParseEngine`, which nobody else may use from now on.

    Args:
        engine: the engine, or what loads it. Then that happens in the thread that uses it: OpenMP keeps threads for
            each thread that has computed something, and more of them than there are cores slow all of them down.

    Attributes:
        parallel: 1, as the engine answers one request at a time.
    """

    parallel = 1

    def __init__(self, engine: ParseEngine | Callable[[], ParseEngine]) -> None:
        self._runs: queue.SimpleQueue[_Run | Callable[[], None] | None] = queue.SimpleQueue()
        self._running = 0
        loaded: Future[ParseEngine] = Future()
        Thread(target=self._work, args=(engine, loaded), name="parse-engine", daemon=True).start()
        self._engine = loaded.result()
        super().__init__(self._engine.target, self._engine.draft)
        self.threshold = self._engine.threshold
        self.calibration = self._engine.calibration

    @property
    def running(self) -> int:
        return self._running

    def check_calibration(self) -> None:
        done: Future[None] = Future()

        def check() -> None:
            try:
                self._engine.check_calibration()
                done.set_result(None)
            except ValueError as error:
                done.set_exception(error)

        self._runs.put(check)  # weights are compared
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
        """No jobs follow; the thread ends behind those that it has."""
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
            self._running = 1
            try:
                with self._engine.backend.cancellable(lambda run=run: run.unwanted):  # type: ignore[misc]
                    for event in self._events(run.job):
                        run.post(Moment(event, time.perf_counter()), now=run.job.watched)
                run.post()
            except Interrupted:
                pass
            except BaseException as error:  # whatever it was, the next job is another one
                run.post(error)
            finally:
                self._running = 0

    def _events(self, job: Job) -> Iterator[Event]:
        try:
            if job.alone:
                return self._engine.stream_target(job.prompt, job.settings)
            return self._engine.stream(job.prompt, job.settings, job.draft_text)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


class _Run:
    """A job on its way through the worker thread; `inbox` belongs to the event loop.

    The loop is woken as seldom as can be: where cores are few, each time costs the model's threads milliseconds.
    """

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.unwanted = False
        self.inbox: asyncio.Queue[Moment | BaseException] = asyncio.Queue()
        self._loop = loop
        self._posted: deque[Moment | BaseException] = deque()
        self._woken = False

    def post(self, *what: Moment | BaseException, now: bool = True) -> None:
        """Called by the worker. With `now` all that was posted so far is on its way."""
        self._posted.extend(what)
        if now and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, and nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the last look: what comes later wakes the loop again
        while self._posted:
            self.inbox.put_nowait(self._posted.popleft())
