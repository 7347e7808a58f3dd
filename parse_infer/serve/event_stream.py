"""Event stream of the answers to one request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from parse_infer.request.events import Done, Event
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.audit import Audit
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.runner import InvalidRequest, Job, Runner, TokenPrompt
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.prompts import Chat, Prompt

log = logging.getLogger("parse_infer.serve")


ChoiceEvent = tuple[ChoiceState, Event, str]
"""The choice of an event, the event, and the text that may be sent now."""


@dataclass(frozen=True)
class RequestedAnswers:
    """One answer to each prompt with each of the settings. The other fields are those of `Job`."""

    prompts: Sequence[Prompt | TokenPrompt]
    settings: Sequence[GenerationSettings]
    draft_text: str | None = None
    alone: bool = False
    streamed: bool = True

    def __len__(self) -> int:
        return len(self.prompts) * len(self.settings)

    async def jobs(self, runner: Runner) -> list[tuple[Job, int]]:
        """Render each prompt once; return the jobs with their numbers of prompt tokens. Raises ApiError."""
        jobs = []
        for prompt in self.prompts:
            try:
                runner.check_length("draft text", len(self.draft_text or ""))
                rendered, ids = await runner.render(prompt, drafted=not self.alone and self.draft_text is None)
            except InvalidRequest as error:
                code = "context_length_exceeded" if "window" in str(error) else "invalid_value"
                raise ApiError(400, str(error), code) from error
            thinking = await runner.thinking(rendered, ids) if isinstance(prompt, Chat) else None
            tokens = len(ids)
            jobs += [
                (Job(rendered, settings, self.draft_text, self.alone, self.streamed, thinking=thinking), tokens)
                for settings in self.settings
            ]
        return jobs


async def answers(
    runner: Runner, queue: AdmissionQueue, metrics: Metrics, requested: RequestedAnswers, audit: Audit | None = None
) -> AsyncGenerator[ChoiceEvent, None]:
    """Admit a request and yield all its events.

    Raises ApiError if the queue or the runner rejects the request, or if the runner fails.
    """
    asked_at = time.perf_counter()
    async with queue.place(len(requested)):
        with api_errors():
            jobs = await requested.jobs(runner)
        metrics.prompt_tokens.inc(sum(tokens for _, tokens in jobs[:: len(requested.settings)]))
        choices = [ChoiceState(i, job, prompt_tokens, asked_at) for i, (job, prompt_tokens) in enumerate(jobs)]
        streams = [_answered(runner, queue, metrics, choice, audit) for choice in choices]
        side_by_side = runner.parallel > 1 and len(streams) > 1
        async with aclosing(_merged(streams) if side_by_side else _chained(streams)) as events:
            async for event in events:
                yield event


async def _answered(
    runner: Runner, queue: AdmissionQueue, metrics: Metrics, choice: ChoiceState, audit: Audit | None
) -> AsyncGenerator[ChoiceEvent, None]:
    with api_errors(choice.index), metrics.meter(choice) as meter:
        async with queue.seat(), aclosing(runner.stream(choice.job)) as moments:
            async for moment in moments:
                text = choice.take(moment)
                meter.see(moment, text)
                if isinstance(moment.event, Done):
                    queue.note(moment.event.generation.timings.total_s)
                    if audit is not None:
                        audit.consider(choice)
                yield choice, moment.event, text


async def _chained(streams: Sequence[AsyncGenerator[ChoiceEvent, None]]) -> AsyncGenerator[ChoiceEvent, None]:
    for stream in streams:
        async with aclosing(stream):
            async for event in stream:
                yield event


async def _merged(streams: Sequence[AsyncGenerator[ChoiceEvent, None]]) -> AsyncGenerator[ChoiceEvent, None]:
    """Merge the streams; the first error ends all of them."""
    queue: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue()

    async def follow(stream: AsyncGenerator[ChoiceEvent, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    try:
        going = len(tasks)
        while going:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                going -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def api_errors(index: int = 0) -> Iterator[None]:
    """Turn rejections and failures of the runner into ApiError; the log names the answer's index."""
    try:
        yield
    except InvalidRequest as error:
        raise ApiError(400, str(error), "invalid_value") from error
    except (ApiError, TimeoutError):
        raise
    except Exception as error:
        log.exception("failure", extra={"fields": {"index": index}})
        raise failure() from error
