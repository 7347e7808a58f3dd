"""Takes an accepted body to its answer: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.types import Send

from parse_infer.generation import Done, Event
from parse_infer.models.prompts import Prompt, RenderedPrompt
from parse_infer.promise import promised
from parse_infer.serve.answers import Told, answers
from parse_infer.serve.audit import Audit
from parse_infer.serve.backend import Backend, Job, Refused
from parse_infer.serve.body import AnswerBody
from parse_infer.serve.chat import ChatBody
from parse_infer.serve.choice import Choice, event_body
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.exchange import Exchange
from parse_infer.serve.line import Line
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.relay import relayed
from parse_infer.serve.usage import Usage, usage_of

log = logging.getLogger("parse_infer.serve")


class Shape(Protocol):
    """How one of the two APIs writes its answers out."""

    prefix: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first entry of a choice in a stream, if there is one."""
        ...

    def piece(self, index: int, text: str) -> dict[str, Any]: ...

    def closing(self, choice: Choice) -> dict[str, Any]: ...

    def whole(self, name: str, created: int, model: str, choices: Sequence[Choice], usage: Usage) -> BaseModel: ...


class Desk:
    """Where requests are turned into jobs, and events into what the client reads.

    Args:
        model: the name under which the backend's target is served.
        risk: promise of the requests that name none, where the calibration covers them.
        adaptive: of the requests that do not say, see `GenerationSettings`.
        note: told what the log is told of every request.
    """

    def __init__(
        self,
        backend: Backend,
        line: Line,
        metrics: Metrics,
        model: str,
        risk: float | None = None,
        adaptive: bool = False,
        audit: Audit | None = None,
        note: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.backend = backend
        self.line = line
        self.metrics = metrics
        self.model = model
        self._risk = risk
        self._adaptive = adaptive
        self._audit = audit
        self.note = note

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"the model {str(name)[:100]!r} is not served here, but {self.model!r} is"
            raise ApiError(404, message, "model_not_found", "model")

    async def jobs(
        self, body: AnswerBody, prompts: Sequence[Prompt], max_new_tokens: int, draft_text: str | None
    ) -> list[tuple[Job, int]]:
        """`n` jobs for each prompt, with its tokens counted. Raises ApiError for what cannot be answered."""
        settings = [body.settings(max_new_tokens, choice) for choice in range(body.choices)]
        if not body.alone and draft_text is None:
            if not body.says_adaptive:
                settings = [each.override(adaptive=self._adaptive) for each in settings]
            settings = [promised(each, self._risk, self.backend.calibration) for each in settings]
        found = []
        for prompt in map(RenderedPrompt.of, prompts):  # rendered here, and in no job again
            try:
                tokens = len(await self.backend.render(prompt))
            except Refused as error:
                code = "context_length_exceeded" if "window" in str(error) else "invalid_value"
                raise ApiError(400, str(error), code) from error
            found += [
                (Job(prompt, each, draft_text, body.alone, watched=bool(body.stream)), tokens) for each in settings
            ]
        return found

    def answer(self, shape: Shape, body: AnswerBody, jobs: Sequence[tuple[Job, int]]) -> Exchange:
        paper = _Paper(self, shape, body)
        events = answers(self.backend, self.line, self.metrics, jobs, self._audit)
        return Exchange(lambda send: paper.stream(events, send) if body.stream else paper.whole(events, send))

    def relay(self, body: ChatBody) -> Exchange:
        """The target's own server answers, without a draft."""
        pieces = relayed(self.backend, self.line, self.metrics, body, self.model)

        async def whole(send: Send) -> None:
            async with aclosing(pieces):
                (answer,) = [piece async for piece in pieces]
            await _write_whole(send, json.dumps(answer, ensure_ascii=False).encode())

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield _sent(piece)

        return Exchange(lambda send: _write_events(send, chunks()) if body.stream else whole(send))


Answers = AsyncGenerator[Told, None]


class _Paper:
    """The answer to one request, as it is written out."""

    def __init__(self, desk: Desk, shape: Shape, body: AnswerBody) -> None:
        self._desk = desk
        self._shape = shape
        self._per_prompt = body.choices
        self._tells_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._tells_events = body.parse is not None and body.parse.events
        self._name = shape.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._heard: dict[int, Choice] = {}

    async def whole(self, events: Answers, send: Send) -> None:
        async with aclosing(events):
            async for choice, _, _ in events:
                self._note(choice)
        answer = self._shape.whole(self._name, self._created, self._desk.model, self._choices, self._usage())
        self._log()
        await _write_whole(send, answer.model_dump_json().encode())

    async def stream(self, events: Answers, send: Send) -> None:
        await _write_events(send, self._events(events))

    async def _events(self, events: Answers) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for choice, event, text in events:
                yield b"".join(map(_sent, self._chunks(choice, event, text)))
        if self._tells_usage:
            yield _sent({**self._chunk([]), "usage": self._usage().model_dump()})
        self._log()

    def _chunks(self, choice: Choice, event: Event, text: str) -> Iterator[dict[str, Any]]:
        if self._note(choice):
            opening = self._shape.opening(choice.index)
            if opening is not None:
                yield self._chunk([opening])
        told = event_body(event) if self._tells_events else None
        if text or told is not None:
            piece = self._shape.piece(choice.index, text)
            yield self._chunk([piece if told is None else {**piece, "parse": told}])
        if isinstance(event, Done):
            closing = self._shape.closing(choice)
            yield self._chunk([{**closing, "parse": choice.statistics().model_dump()}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {
            "id": self._name,
            "object": self._shape.chunk_object,
            "created": self._created,
            "model": self._desk.model,
            "choices": choices,
        }
        return {**chunk, "usage": None} if self._tells_usage else chunk

    def _note(self, choice: Choice) -> bool:
        """Whether this is the first that is heard of the choice."""
        new = choice.index not in self._heard
        self._heard[choice.index] = choice
        return new

    @property
    def _choices(self) -> list[Choice]:
        return [self._heard[index] for index in sorted(self._heard)]

    def _usage(self) -> Usage:
        return usage_of(self._choices, self._per_prompt)

    def _log(self) -> None:
        """Counts only: prompts and answers are nobody else's business."""
        usage = self._usage()
        fields = {
            "id": self._name,
            "answers": len(self._choices),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "accepted_tokens": usage.completion_tokens_details.accepted_prediction_tokens,
            "rejected_tokens": usage.completion_tokens_details.rejected_prediction_tokens,
        }
        log.info("answered", extra={"fields": fields})
        if self._desk.note is not None:
            self._desk.note(fields)


def _sent(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _write_whole(send: Send, body: bytes) -> None:
    await _begin(send, b"application/json")
    await _write(send, body, more=False)


async def _write_events(send: Send, events: AsyncGenerator[bytes, None]) -> None:
    """A stream of server-sent events. Errors before the first have a status of their own, later ones are an event."""
    begun = False
    try:
        async with aclosing(events):
            async for sent in events:
                if not begun:
                    await _begin(send, b"text/event-stream; charset=utf-8")
                    begun = True
                if sent:
                    await _write(send, sent)
        await _write(send, b"data: [DONE]\n\n", more=False)
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, ApiError):
            log.exception("failure")
        told = error if isinstance(error, ApiError) else failure()
        await _write(send, _sent(told.body), more=False)


async def _begin(send: Send, media_type: bytes) -> None:
    headers = [(b"content-type", media_type), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _write(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
