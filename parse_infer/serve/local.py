"""The local engine behind the server: one thread owns it, and answers one job after the other."""

from __future__ import annotations

import asyncio
import copy
import queue
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from parse_infer.engine import ParseEngine
from parse_infer.generation import Done, Event, Interrupted
from parse_infer.models.loading import LanguageModel
from parse_infer.models.prompts import Prompt, Verbatim
from parse_infer.serve.backend import Job, Moment, Refused

Result = TypeVar("Result")


class LocalBackend:
    """A `Backend` for one `ParseEngine`, which nobody else may use from now on.

    Attributes:
        parallel: 1, as the engine answers one request at a time.
    """

    parallel = 1

    def __init__(self, engine: ParseEngine) -> None:
        self.name = engine.target.name
        self.window = engine.target.window
        self.threshold = engine.threshold
        self.calibration = engine.calibration
        self._engine = engine
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._running = 0
        self._reader = _Reader(engine.target)
        Thread(target=self._work, name="parse-engine", daemon=True).start()

    @property
    def running(self) -> int:
        return self._running

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        return await self._reader.ask(lambda own: own.tokenizer.encode(text, add_special_tokens=special_tokens))

    async def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self._engine.target.n_embeddings)
        return str(await self._reader.ask(lambda own: own.tokenizer.decode(list(ids))))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        return await self._reader.ask(lambda own: [str(own.tokenizer.convert_ids_to_tokens(i)) for i in ids])

    async def verbatim(self, ids: Sequence[int]) -> Verbatim:
        _check_ids(ids, self._engine.target.n_embeddings)
        return await self._reader.ask(lambda own: Verbatim.of_tokens(ids, own.tokenizer))

    async def render(self, prompt: Prompt) -> list[int]:
        try:
            return await self._reader.ask(lambda own: own.render(prompt))
        except ValueError as error:
            raise Refused(str(error)) from error

    def tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self._engine.target.tokenizer
        special = {
            name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "max_model_len": self.window,
            "chat_template": tokenizer.chat_template,
            **{name: None if token is None else str(token) for name, token in special.items()},
        }

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
        self._reader.close()

    def _work(self) -> None:
        for run in iter(self._runs.get, None):
            if run.unwanted:
                continue
            self._running = 1
            try:
                with self._engine.interruptible(lambda run=run: run.unwanted):  # type: ignore[misc]
                    for event in self._events(run.job):
                        run.post(Moment(event, time.perf_counter()))
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
            raise Refused(str(error)) from error


class _Run:
    """A job on its way through the worker thread; `inbox` belongs to the event loop."""

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.unwanted = False
        self.inbox: asyncio.Queue[Moment | BaseException] = asyncio.Queue()
        self._loop = loop

    def post(self, what: Moment | BaseException) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody listens any more
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, what)


class _Reader:
    """The target's tokenizer in a thread of its own: a long text stops neither the event loop nor the engine, and a
    copy is used, since tokenizers are not made for two threads."""

    def __init__(self, target: LanguageModel) -> None:
        self._own = copy.copy(target)
        self._own.tokenizer = copy.deepcopy(target.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse-tokenizer")

    async def ask(self, question: Callable[[LanguageModel], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._own)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _check_ids(ids: Sequence[int], n: int) -> None:
    strange = next((token for token in ids if not 0 <= token < n), None)
    if strange is not None:
        raise Refused(f"{strange} is no token of this model, which has tokens 0 to {n - 1}")
