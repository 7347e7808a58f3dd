"""The answers to one request, one after the other, as they happen."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from parse_infer.generation import Done, Event
from parse_infer.serve.audit import Audit
from parse_infer.serve.backend import Backend, Job, Refused
from parse_infer.serve.choice import Choice
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.line import Line
from parse_infer.serve.metrics import Metrics

log = logging.getLogger("parse_infer.serve")


async def answers(
    backend: Backend, line: Line, metrics: Metrics, jobs: Sequence[tuple[Job, int]], audit: Audit | None = None
) -> AsyncGenerator[tuple[Choice, Event, str], None]:
    """Every event, with the choice that it belongs to and the text that may be sent now.

    Args:
        jobs: each with the number of tokens of its prompt.

    Raises ApiError: what the backend refuses, or fails on.
    """
    asked_at = time.perf_counter()
    async with line.place(len(jobs)):
        for index, (job, prompt_tokens) in enumerate(jobs):
            choice = Choice(index, job, prompt_tokens, asked_at)
            meter = metrics.meter(choice)
            try:
                with api_errors(index):
                    async with aclosing(backend.stream(job)) as moments:
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


@contextmanager
def api_errors(index: int = 0) -> Iterator[None]:
    """What the backend refuses or fails on while it writes a request's answer of this index becomes an ApiError."""
    try:
        yield
    except Refused as error:
        raise ApiError(400, str(error), "invalid_value") from error
    except (ApiError, TimeoutError):
        raise
    except Exception as error:
        log.exception("failure", extra={"fields": {"index": index}})
        raise failure() from error
