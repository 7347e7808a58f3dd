"""A draft model in the engine's process, with the interface of `ReplicaPool`.

For a small model on a CPU, where a server adds milliseconds to each step. One thread decodes all drafts with
continuous batching: requests join and leave the batch at any token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch

from parse_infer.backends.pool.retries import Unavailable
from parse_infer.models.batch_decoder import Batch, BatchDecoder, BatchRow, RunningRow
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling

_ROWS = 64  # batch size
_PIECE = 16  # tokens per piece: each piece wakes the event loop
_NICE = 5
_FREE = 1 / 4  # share of free slots from which the batch is compacted, which copies all other slots


@dataclass
class _Job:
    """A requested draft.

    Attributes:
        max_tokens: limit of the draft.
        pieces: pieces of the draft; then None, or the error.
        cancelled: the caller has left.
    """

    ids: list[int]
    max_tokens: int
    sampling: Sampling
    end_ids: frozenset[int]
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[list[int] | Exception | None] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    sent: int = 0

    async def next_piece(self, silence_s: float | None) -> list[int] | Exception | None:
        try:
            async with asyncio.timeout(silence_s):
                return await self.pieces.get()
        except TimeoutError as error:
            raise Unavailable(f"the draft model wrote nothing for {silence_s:g} s") from error

    def put(self, piece: list[int] | Exception | None) -> None:
        with suppress(RuntimeError):  # its event loop has ended
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class InProcessDraft:
    """A draft model in this process.

    Args:
        shares_cores: the target runs on this machine's CPU; use one thread, like a draft server
            (`vllm_process.environment`).
        rows: batch size; more drafts wait.
    """

    def __init__(self, model: LanguageModel, shares_cores: bool = False, rows: int = _ROWS) -> None:
        self._decoder = BatchDecoder(model.model, model.eos_ids, rows, model.decoder.fast)
        self._shares_cores = shares_cores
        self._arrived: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def acquire(self, optional: bool = False, session: object = None) -> Iterator[None]:
        """Do nothing; the counterpart of `ReplicaPool.acquire`."""
        yield

    async def written(
        self,
        ids: Sequence[int],
        max_tokens: int,
        settings: Mapping[str, Any],
        place: object = None,
        silence_s: float | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Yield tokens as `ReplicaPool.written` does, without `stop`; the caller may close it. Raises Unavailable."""
        numbers = {name: settings[name] for name in ("temperature", "top_p", "top_k")}
        numbers["top_k"] = max(0, numbers["top_k"])
        sampling = Sampling(**numbers, seed=settings.get("seed", secrets.randbits(62)))
        job = _Job(list(ids), max_tokens, sampling, frozenset(settings["stop_token_ids"]), asyncio.get_running_loop())
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="parse-draft", daemon=True)
            self._thread.start()
        self._arrived.put(job)
        try:
            while (piece := await job.next_piece(silence_s)) is not None:
                if isinstance(piece, Exception):
                    raise Unavailable(f"the draft model failed: {piece}") from piece
                yield piece
        finally:
            job.cancelled = True

    def close(self) -> None:
        """End all drafts with an error and wait for the thread to end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._arrived.put(None)
            thread.join()

    async def aclose(self) -> None:
        """Close, as `ReplicaPool.aclose` does."""
        self.close()

    def _work(self) -> None:
        """Main loop of the thread."""
        if self._shares_cores:
            torch.set_num_threads(1)
            if hasattr(os, "setpriority"):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        batch, writing, waiting = self._decoder.batch(), list[tuple[_Job, RunningRow]](), deque[_Job]()

        def fail(error: Exception) -> None:
            for job in [*(job for job, _ in writing), *waiting]:
                job.put(error)

        while True:
            while not self._arrived.empty() or not (writing or waiting):
                job = self._arrived.get()
                if job is None:
                    fail(RuntimeError("it was closed"))
                    return
                waiting.append(job)
            waiting = deque(job for job in waiting if not job.cancelled)
            try:
                writing = self._step(batch, writing, waiting)
            except Exception as error:  # such as out of memory: the next drafts may fit
                fail(error)
                batch, writing = self._decoder.batch(), []
                waiting.clear()

    def _step(
        self, batch: Batch, writing: list[tuple[_Job, RunningRow]], waiting: deque[_Job]
    ) -> list[tuple[_Job, RunningRow]]:
        """Add waiting drafts to free slots and decode one token of each draft. Returns the unfinished drafts."""
        arriving = list(islice(waiting, self._decoder.batch_size - len(writing)))
        runs = self._begun(arriving)
        if runs:
            batch.add(runs)
        writing += zip(arriving, runs, strict=True)
        for _ in arriving:
            waiting.popleft()
        batch.step()
        for job, run in writing:
            run.ended = run.ended or run.written[-1] in job.end_ids or job.cancelled
            if run.ended or len(run.written) - job.sent >= _PIECE:
                job.put(run.written[job.sent :])
                job.sent = len(run.written)
            if run.ended:
                job.put(None)
        if len(batch.free) > _FREE * len(batch.runs):
            batch.compact()
        return [(job, run) for job, run in writing if not run.ended]

    def _begun(self, jobs: Sequence[_Job]) -> list[RunningRow]:
        if not jobs:
            return []
        contexts = self._decoder.prefill([job.ids for job in jobs])
        rows = [BatchRow(i, len(job.ids), job.max_tokens, job.sampling) for i, job in enumerate(jobs)]
        return [self._decoder.run(contexts, row) for row in rows]
