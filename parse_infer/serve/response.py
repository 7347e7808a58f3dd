"""Responses: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parse_infer.request.events import Done, Event
from parse_infer.serve.choice_state import ChoiceState, Usage, event_body, usage_of, usage_so_far
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.event_stream import ChoiceEvent
from parse_infer.serve.logs import request_id
from parse_infer.serve.protocol.fields import AnswerBody
from parse_infer.serve.span_attributes import answer_attributes, request_attributes

log = logging.getLogger("parse_infer.serve")
Answers = AsyncGenerator[ChoiceEvent, None]
_LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
KEEP_ALIVE_S = 15.0
LAST_WRITE_S = 5.0  # for an error event to a client that has stopped reading
GONE = 499  # nginx's status for a client that disconnected, for logs and metrics


class CancellableResponse(Response):
    """Runs `work(send)`, which sends the whole response, and cancels `work` when the client disconnects.

    The framework answers errors that `work` raises before it sends anything.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Shape(Protocol):
    """JSON shape of the answers of one API."""

    prefix: str
    chunk_object: str
    path: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """First entry of a choice in a stream, if the API has one."""
        ...

    def piece(self, choice: ChoiceState, text: str, last: bool) -> dict[str, Any]:
        """The entry of a choice's new text; `last`: it ends the answer."""
        ...

    def is_empty(self, piece: Mapping[str, Any]) -> bool:
        """Whether a piece tells the client nothing."""
        ...

    def closing(self, choice: ChoiceState) -> dict[str, Any]: ...

    def whole(
        self, name: str, created: int, model: str, choices: Sequence[ChoiceState], usage: Usage
    ) -> BaseModel: ...


class AnswerWriter:
    """Writes the response to one request.

    Args:
        model: served model name.
        warnings: texts of the response's warning header.
        unpromised: why the server's promise does not cover the answer; None: it does.
        note: called with the fields of the log record.
    """

    def __init__(
        self,
        shape: Shape,
        body: AnswerBody,
        model: str,
        warnings: Sequence[str],
        unpromised: str | None,
        note: Callable[[Mapping[str, Any]], None],
    ) -> None:
        options = body.stream_options
        self._shape = shape
        self._model = model
        self._warnings = warnings
        self._unpromised = unpromised
        self._note = note
        self._per_prompt = body.choices
        self._alone = body.alone
        self._streams = bool(body.stream)
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._include_events = body.parse is not None and body.parse.events
        self._name = shape.prefix + request_id.get()
        self._created = int(time.time())
        self._seen: dict[int, ChoiceState] = {}
        self._opened: set[int] = set()

    async def whole(self, events: Answers, send: Send) -> None:
        async with aclosing(events):
            async for choice, _, _ in events:
                self._register(choice)
        answer = self._shape.whole(self._name, self._created, self._model, self._choices, self._usage())
        self._log()
        await write_whole(send, answer.model_dump_json().encode(), self._warnings)

    async def stream(self, events: Answers, send: Send) -> None:
        await write_events(send, self._events(events), self._warnings)

    async def _events(self, events: Answers) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for choice, event, text in events:
                yield b"".join(map(event_line, self._chunks(choice, event, text)))
        if self._include_usage:
            yield event_line({**self._chunk([]), "usage": self._usage().model_dump()})
        self._log()

    def _chunks(self, choice: ChoiceState, event: Event, text: str) -> Iterator[dict[str, Any]]:
        self._register(choice)
        details = event_body(event) if self._include_events else None
        piece = self._shape.piece(choice, text, isinstance(event, Done))
        says = details is not None or not self._shape.is_empty(piece)
        if (says or isinstance(event, Done)) and choice.index not in self._opened:
            self._opened.add(choice.index)  # with the first text, which benchmarks take for the first token
            if (opening := self._shape.opening(choice.index)) is not None:
                yield self._chunk([opening], choice, opens=True)
        if says:
            yield self._chunk([piece if details is None else {**piece, "parse": details}], choice)
        if isinstance(event, Done):
            closing = self._shape.closing(choice)
            yield self._chunk([{**closing, "parse": choice.statistics().model_dump()}], choice)

    def _chunk(
        self, choices: list[dict[str, Any]], choice: ChoiceState | None = None, opens: bool = False
    ) -> dict[str, Any]:
        chunk = {
            "id": self._name,
            "object": self._shape.chunk_object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if not self._include_usage:
            return chunk
        if choice is None or not self._continuous_usage:
            return {**chunk, "usage": None}
        return {**chunk, "usage": usage_so_far(choice, 0 if opens else choice.tokens_so_far).model_dump()}

    def _register(self, choice: ChoiceState) -> None:
        choice.unpromised = self._unpromised
        self._seen[choice.index] = choice

    @property
    def _choices(self) -> list[ChoiceState]:
        return [self._seen[index] for index in sorted(self._seen)]

    def _usage(self) -> Usage:
        return usage_of(self._choices, self._per_prompt)

    def _log(self) -> None:
        """Log numbers and decisions only, never text of prompts or answers."""
        usage, choices = self._usage(), self._choices
        drafted = sum(choice.drafted for choice in choices)
        fields = {
            "id": request_id.get(),
            "answers": len(choices),
            "seconds": round(time.perf_counter() - choices[0].asked_at, 4),
            "mode": "draft" if drafted == len(choices) else "mixed" if drafted else "target",
            "adaptive": not self._alone and bool(choices[0].job.settings.adaptive),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "accepted_tokens": sum(choice.answer.stats.accepted_tokens for choice in choices),
            "rejected_tokens": sum(
                choice.answer.stats.draft_tokens - choice.answer.stats.accepted_tokens for choice in choices
            ),
        }
        log.info("answered", extra={"fields": fields})
        own = request_attributes(self._shape.path, self._model, self._streams, self._per_prompt)
        self._note(fields | own | answer_attributes(self._name, self._model, choices, usage))


def event_line(value: object) -> bytes:
    """One server-sent event. Readers of lines also split at the characters of `_LINE_ENDS`, so these are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode()


async def write_whole(send: Send, body: bytes, warnings: Sequence[str] = ()) -> None:
    await _begin(send, b"application/json", warnings)
    await _write(send, body, more=False)


async def write_events(send: Send, events: AsyncGenerator[bytes, None], warnings: Sequence[str] = ()) -> None:
    """Send server-sent events, and a comment after every `KEEP_ALIVE_S` without one, since proxies close a silent
    connection. An error before the first of these sets the HTTP status; a later one becomes an event."""
    stream = _EventStream(send, warnings)
    keeper = asyncio.ensure_future(stream.keep_alive())
    try:
        try:
            async with aclosing(events):
                async for sent in events:
                    await stream.write(sent)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await stream.write(b"data: [DONE]\n\n", more=False)
    except asyncio.CancelledError:
        # The time limit can end a write to a reader that has stopped. It gets the reason if it soon goes on.
        if stream.begun:
            ended = ApiError(504, "the answer was not read within the time limit of the request", "timeout")
            with suppress(TimeoutError):
                await asyncio.wait_for(stream.write(event_line(ended.body), more=False), LAST_WRITE_S)
        raise
    except Exception as error:
        if not stream.begun:
            raise
        if not isinstance(error, ApiError):
            log.exception("failure")
        reported = error if isinstance(error, ApiError) else failure()
        await stream.write(event_line(reported.body), more=False)


class _EventStream:
    """Writes of two tasks, one after the other."""

    def __init__(self, send: Send, warnings: Sequence[str]) -> None:
        self.begun = False
        self._send, self._warnings = send, warnings
        self._turn, self._last = asyncio.Lock(), time.monotonic()

    async def write(self, body: bytes, more: bool = True) -> None:
        async with self._turn:
            if not self.begun:
                await _begin(self._send, b"text/event-stream; charset=utf-8", self._warnings)
                self.begun = True
            if body:
                await _write(self._send, body, more)
            self._last = time.monotonic()

    async def keep_alive(self) -> None:
        while True:
            silent = time.monotonic() - self._last
            if silent < KEEP_ALIVE_S:
                await asyncio.sleep(KEEP_ALIVE_S - silent)
            else:
                await self.write(b": keep-alive\n\n")


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Warning header in ASCII without line breaks or spaces around it, also for odd field names."""
    return {"x-parse-warning": ascii("; ".join(warnings))[1:-1].strip()} if warnings else {}


async def _begin(send: Send, media_type: bytes, warnings: Sequence[str]) -> None:
    headers = [(b"content-type", media_type), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    headers += [(name.encode(), value.encode()) for name, value in warning_header(warnings).items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _write(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
