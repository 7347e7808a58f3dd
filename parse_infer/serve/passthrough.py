"""Pass-through: requests that a draft cannot speed up go to the target's own server, as bytes.

Routes that PARSE does not have are the target's too: `OTHER`, without those for LoRAs. Engines have the routes that
control a server outside `/v1`, so there all others are refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Send

from parse_infer.backends.pool.origin import REQUEST_ID
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.errors import ApiError, unsupported_field
from parse_infer.serve.event_stream import api_errors
from parse_infer.serve.large_bodies import Handler, ReadingRoute
from parse_infer.serve.logs import request_id
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.response import LAST_WRITE_S, event_line
from parse_infer.serve.runner import Runner
from parse_infer.serve.span_attributes import request_attributes

log = logging.getLogger("parse_infer.serve")
OTHER = ("/v1/{path:path}", "/score", "/rerank", "/v2/rerank", "/v2/embed", "/pooling", "/classify")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_PATH = re.compile(r"(/\w[\w.-]*)+", re.ASCII)  # no "..", which would lead out of /v1
_LORA = "lora_adapter"  # in the paths that load and unload one
_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta")
_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class RelayedRequest(PassedRequest):
    """A request for the target's server.

    Attributes:
        because: the field that only the target's server supports, or the route. A log has the part before a colon,
            which nobody but us has written.
    """

    because: str

    @classmethod
    async def of(cls, request: Request, fields: Mapping[str, Any] | None, because: str) -> RelayedRequest:
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        path = f"{request.scope['path']}?{request.url.query}" if request.url.query else request.scope["path"]
        return cls(request.method, path, await request.body(), headers, fields, because)

    @property
    def model(self) -> object:
        return (self.fields or {}).get("model")

    @property
    def served_name(self) -> str | None:
        """The model's name, once it is known to be that of this server."""
        return self.model if isinstance(self.model, str) else None


class Unknown(Exception):
    """Ends the handling of a request with a field that only the target's server may know."""

    def __init__(self, field: str) -> None:
        name = field if _NAME.fullmatch(field) else "of another name"  # a header is ASCII
        super().__init__(f"unknown field: {name}")


def passing_route(relay: Callable[[RelayedRequest], Response]) -> type[ReadingRoute]:
    """Return a kind of route that relays each request with a field that is not supported, or not known, here."""

    class PassingRoute(ReadingRoute):
        def handler(self) -> Handler:
            own = super().handler()

            async def handle(request: Request) -> Response:
                try:
                    return await own(request)
                except Unknown as error:
                    because = str(error)
                except RequestValidationError as error:
                    unsupported = unsupported_field(error.errors())
                    if unsupported is None or not isinstance((await request.json()).get("model"), str | None):
                        raise
                    because = unsupported
                return relay(await RelayedRequest.of(request, await request.json(), because))

            return handle

    return PassingRoute


async def other_request(request: Request) -> RelayedRequest:
    """Return a request for a route that only the target's server may have.

    Raises HTTPException where the route would change that server or PARSE has it for other methods, and ApiError where
    the JSON is no object.
    """
    path = request.scope["path"]
    if _LORA in path or not _PATH.fullmatch(path):
        raise HTTPException(404)
    if any(route.matches(request.scope)[0] is Match.PARTIAL for route in request.app.routes):
        raise HTTPException(405)
    if not await request.body() or "json" not in request.headers.get("content-type", "application/json"):
        return await RelayedRequest.of(request, None, "path")
    try:
        fields = await request.json()
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    return await RelayedRequest.of(request, fields, "path")


async def pass_through(
    runner: Runner,
    queue: AdmissionQueue,
    metrics: Metrics,
    request: RelayedRequest,
    note: Callable[[Mapping[str, Any]], None],
    send: Send,
) -> None:
    """Send the response of the target's server: status, headers and bytes. See `RequestHandler.relay`.

    Raises ApiError before the response begins, and where its content is no event stream that can end with an error.
    """
    asked_at, response = time.perf_counter(), _PassedResponse(send, request.because)
    try:
        async with queue.place(request.answers, relayed=True):
            with api_errors():
                async with queue.seat(request.answers, relayed=True):
                    await response.write(runner.relay(request))
            metrics.relayed.inc(request.answers)
            metrics.count_client(request.answers)
            fields = {
                "id": request_id.get(),
                "answers": request.answers,
                "seconds": round(time.perf_counter() - asked_at, 4),
                "mode": "target",
                "adaptive": False,
                "because": request.because.partition(":")[0],
            }
            if (upstream_id := response.upstream_id) is not None:
                fields["upstream_id"] = upstream_id
            log.info("answered", extra={"fields": fields})
            own = request_attributes(request.path, request.served_name, request.streams, request.answers)
            note(fields | own)
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

    @property
    def upstream_id(self) -> str | None:
        """The server's own id of the request, if it reports one."""
        headers = {} if self.head is None else dict(self.head.headers)
        found = headers.get(REQUEST_ID.encode())
        return None if found is None else found.decode("latin-1")[:100]

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
