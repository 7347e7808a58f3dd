"""The answers to one request, as they happen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from parse_infer.events import Done, Event
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.protocol.requested import RequestedAnswers
from parse_infer.serve.risk_monitor import Audit
from parse_infer.serve.runner import InvalidRequest, Runner

log = logging.getLogger("parse_infer.serve")


Told = tuple[ChoiceState, Event, str]
"""An event, with the choice that it belongs to and the text that may be sent now."""


async def answers(
    backend: Runner, line: AdmissionQueue, metrics: Metrics, requested: RequestedAnswers, audit: Audit | None = None
) -> AsyncGenerator[Told, None]:
    """All events of a request, which is admitted first.

    Raises ApiError: what the backend refuses, or fails on.
    """
    asked_at = time.perf_counter()
    async with line.place(len(requested)):
        with api_errors():
            jobs = await requested.jobs(backend)
        choices = [ChoiceState(i, job, prompt_tokens, asked_at) for i, (job, prompt_tokens) in enumerate(jobs)]
        streams = [_answered(backend, line, metrics, choice, audit) for choice in choices]
        side_by_side = backend.parallel > 1 and len(streams) > 1
        async with aclosing(_as_they_come(streams) if side_by_side else _in_turn(streams)) as events:
            async for event in events:
                yield event


async def _answered(
    backend: Runner, line: AdmissionQueue, metrics: Metrics, choice: ChoiceState, audit: Audit | None
) -> AsyncGenerator[Told, None]:
    meter = metrics.meter(choice)
    try:
        with api_errors(choice.index):
            async with aclosing(backend.stream(choice.job)) as moments:
                async for moment in moments:
                    text = choice.take(moment)
                    meter.see(moment, text)
                    if isinstance(moment.event, Done):
                        line.note(moment.event.generation.timings.total_s)
                        if audit is not None:
                            audit.consider(choice)
                    yield choice, moment.event, text
    finally:
        meter.end()


async def _in_turn(streams: Sequence[AsyncGenerator[Told, None]]) -> AsyncGenerator[Told, None]:
    for stream in streams:
        async with aclosing(stream):
            async for told in stream:
                yield told


async def _as_they_come(streams: Sequence[AsyncGenerator[Told, None]]) -> AsyncGenerator[Told, None]:
    """The first error of one ends all."""
    queue: asyncio.Queue[Told | Exception | None] = asyncio.Queue()

    async def follow(stream: AsyncGenerator[Told, None]) -> None:
        try:
            async with aclosing(stream):
                async for told in stream:
                    queue.put_nowait(told)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    try:
        going = len(tasks)
        while going:
            told = await queue.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                going -= 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def api_errors(index: int = 0) -> Iterator[None]:
    """What the backend refuses or fails on while it writes a request's answer of this index becomes an ApiError."""
    try:
        yield
    except InvalidRequest as error:
        raise ApiError(400, str(error), "invalid_value") from error
    except (ApiError, TimeoutError):
        raise
    except Exception as error:
        log.exception("failure", extra={"fields": {"index": index}})
        raise failure() from error
