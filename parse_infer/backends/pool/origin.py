"""The request for which servers are asked: headers by which their logs and traces name it, and its session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from itertools import count
from types import MappingProxyType

REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"
TRACE = ("traceparent", "tracestate")  # W3C Trace Context

origin: ContextVar[Mapping[str, str]] = ContextVar("origin", default=MappingProxyType({}))
"""`REQUEST_ID`, `TRACE` and the client's `SESSION_ID` of the request that is being answered; empty: none is."""
_numbers = count(1)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-.*")


def trace_id() -> str | None:
    """The id of the trace that the request belongs to; None: it has no valid one."""
    found = _TRACEPARENT.fullmatch(origin.get().get("traceparent", ""))
    return None if found is None else found[1]


def origin_headers() -> dict[str, str]:
    """Headers of a request to a server. Its id is the origin's with a number, as a server may refuse an id in use."""
    headers = dict(origin.get())
    if REQUEST_ID in headers:
        headers[REQUEST_ID] += f"-{next(_numbers)}"
    return headers
