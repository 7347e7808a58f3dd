"""Middleware of every HTTP request: API key, body size, request id, log and metrics."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parse_infer.backends.pool.origin import REQUEST_ID, SESSION_ID, TRACE, origin
from parse_infer.serve.api_keys import ANYONE, ApiKeys, Caller, caller
from parse_infer.serve.errors import ApiError, failure
from parse_infer.serve.logs import client_request_id, request_id
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.response import GONE

log = logging.getLogger("parse_infer.serve")
OPEN = ("/", "/page.js", "/page.css", "/health", "/ready")  # paths that need no key
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_SESSION = re.compile(r"[!-~]{1,256}")
_DISCARDED = 64 << 20  # largest number of bytes read of an oversized body before the connection is dropped


class RequestMiddleware:
    """Middleware around the whole application.

    Args:
        trace_headers: returns the trace headers of the current span; None: those of the client go on to servers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        body_bytes: int,
        metrics: Metrics,
        trace_headers: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._body_bytes = body_bytes
        self._metrics = metrics
        self._trace_headers = trace_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        number, begin, status = uuid.uuid4().hex, time.perf_counter(), GONE
        request_id.set(number)  # the server runs each request in its own context

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        try:
            headers = Headers(scope=scope)
            origin.set({REQUEST_ID: number, **self._trace(headers), **_session(headers)})
            client_request_id.set(own if _ID.fullmatch(own := headers.get(REQUEST_ID, "")) else "")
            if not self._authorized(scope["path"], headers):
                message = "this server needs an API key in the header Authorization: Bearer …, or in x-api-key"
                wrong = ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await wrong.response()(scope, receive, numbered)
            elif _content_length(headers) > self._body_bytes:
                await _discard(receive)
                await self._too_large().response()(scope, receive, numbered)
            else:
                await self._app(scope, self._measured(receive), numbered)
        except Exception:  # stop the error here: outer layers would quote its message in logs and traces
            log.exception("failure")
            if status != GONE:  # the answer has begun
                raise failure() from None
            await failure().response()(scope, receive, numbered)
        finally:
            seconds = time.perf_counter() - begin
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, status).inc()
            self._metrics.request_s.labels(path).observe(seconds)
            fields: Mapping[str, Any] = {
                "method": method if method in _METHODS else "other",
                "path": path,  # the route's: the client's own may be any text
                "status": status,
                "seconds": round(seconds, 4),
            }
            log.info("request", extra={"fields": fields})

    def _trace(self, headers: Headers) -> Mapping[str, str]:
        if self._trace_headers is not None:
            return self._trace_headers()
        return {name: headers[name] for name in TRACE if name in headers}

    def _authorized(self, path: str, headers: Headers) -> bool:
        """Whether the request may be answered; `caller` then has its client."""
        client: Caller | None = ANYONE
        if self._keys.required and path not in OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = (key.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))  # Anthropic's SDK
            client = next(filter(None, map(self._keys.caller_of, filter(None, given))), None)
        caller.set(client or ANYONE)
        return client is not None

    def _measured(self, receive: Receive) -> Receive:
        """Wrap `receive` to limit a body without Content-Length."""
        size = 0

        async def measured() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._body_bytes:
                await _discard(receive)
                raise HTTPException(413, self._too_large().args[0])
            return message

        return measured

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._body_bytes} bytes, the limit of this server's option --max-body-mb"
        return ApiError(413, message, "body_too_large")


def _session(headers: Headers) -> Mapping[str, str]:
    own = headers.get(SESSION_ID, "")
    return {SESSION_ID: own} if _SESSION.fullmatch(own) else {}


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 19 else 0


async def _discard(receive: Receive) -> None:
    """Read the rest of a body; a client that still sends would miss the response."""
    size = 0
    while size < _DISCARDED:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
