"""Pass-through: requests that a draft cannot speed up go to the target's own server, as bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Send

from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.errors import ApiError, unsupported_field
from parse_infer.serve.event_stream import api_errors
from parse_infer.serve.logs import request_id
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.response import LAST_WRITE_S, event_line
from parse_infer.serve.runner import Runner

log = logging.getLogger("parse_infer.serve")


@dataclass(frozen=True)
class PassedRequest:
    """A request for the target's server.

    Attributes:
        fields: the JSON object in `body`.
        because: the field that only the target's server supports.
    """

    path: str
    body: bytes
    fields: Mapping[str, Any]
    because: str

    @property
    def answers(self) -> int:
        n = self.fields.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    @property
    def streams(self) -> bool:
        return self.fields.get("stream") is True


def passing_route(relay: Callable[[PassedRequest], Response]) -> type[APIRoute]:
    """Return a kind of route that relays each request with a field that is valid, but not supported here."""

    class PassingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            own = super().get_route_handler()

            async def handle(request: Request) -> Response:
                try:
                    return await own(request)
                except RequestValidationError as error:
                    because = unsupported_field(error.errors())
                    if because is None:
                        raise
                    fields = await request.json()
                    if not isinstance(fields.get("model"), str | None):
                        raise
                    return relay(PassedRequest(request.url.path, await request.body(), fields, because))

            return handle

    return PassingRoute


async def pass_through(
    runner: Runner,
    queue: AdmissionQueue,
    metrics: Metrics,
    request: PassedRequest,
    note: Callable[[Mapping[str, Any]], None],
    send: Send,
) -> None:
    """Send the response of the target's server: status, headers and bytes. See `RequestHandler.relay`.

    Raises ApiError before the response begins, and where its content is no event stream that can end with an error.
    """
    asked_at, response = time.perf_counter(), _PassedResponse(send, request.because)
    try:
        async with queue.place(request.answers):
            with api_errors():
                pieces = runner.relay(request.path, request.body, request.fields, whole=not request.streams)
                await response.write(pieces)
            metrics.relayed.inc(request.answers)
            fields = {
                "id": request_id.get(),
                "answers": request.answers,
                "seconds": round(time.perf_counter() - asked_at, 4),
                "mode": "target",
                "adaptive": False,
                "because": request.because,
            }
            log.info("answered", extra={"fields": fields})
            note(fields)
            await response.end()  # last, so that a client that has all of it finds it counted
    except ApiError as error:
        if response.head is None or not response.head.is_event_stream:
            raise
        await response.fail(error)


class _PassedResponse:
    """Writes a response. An incomplete event waits for its end, so that an error event may take its place."""

    def __init__(self, send: Send, because: str) -> None:
        self.head: ResponseHead | None = None
        self._send, self._because = send, because
        self._held = b""

    async def write(self, pieces: AsyncGenerator[ResponseHead | bytes, None]) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, ResponseHead):
                    headers = [*piece.headers, (b"x-parse-because", self._because.encode())]
                    await self._send({"type": "http.response.start", "status": piece.status, "headers": headers})
                    self.head = piece
                else:
                    await self._body(self._complete(piece))

    async def end(self) -> None:
        await self._body(self._held, more=False)

    async def fail(self, error: ApiError) -> None:
        """End an event stream with an error event, unless the client has stopped reading."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_S):
                await self._body(event_line(error.body), more=False)

    def _complete(self, piece: bytes) -> bytes:
        held = self._held + piece
        end = len(held)
        if self.head is not None and self.head.is_event_stream:
            end = max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in (b"\n\n", b"\r\n\r\n"))
        self._held = held[end:]
        return held[:end]

    async def _body(self, body: bytes, more: bool = True) -> None:
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
