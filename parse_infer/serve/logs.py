"""Logs as JSON lines on standard error, without any text of requests or answers."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from parse_infer.backends.pool.origin import trace_id
from parse_infer.serve.api_keys import caller

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request, for log lines, the response header and the answer's id."""
client_request_id: ContextVar[str] = ContextVar("client_request_id", default="")
"""The client's own `x-request-id`, for log lines; "": it has none that a log may have."""


class JsonLines(logging.Formatter):
    """Format time, level, event, ids of the request, client and the fields of `extra={"fields": {…}}` as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().partition("\n")[0],  # asyncio quotes exceptions in later lines
        }
        if number := request_id.get():
            line["id"] = number
        if (trace := trace_id()) is not None:
            line["trace_id"] = trace
        if theirs := client_request_id.get():
            line["client_request_id"] = theirs
        if client := caller.get().name:
            line["client"] = client
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["errors"] = describe_error(record.exc_info[1])
        return json.dumps(line)


def describe_error(error: BaseException) -> list[dict[str, Any]]:
    """Class and stack frames of an exception and its causes. The message is left out: it may quote a request."""
    errors, seen = list[dict[str, Any]](), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = [
            f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
            for frame, line in traceback.walk_tb(cause.__traceback__)
        ]
        kind = type(cause)
        errors.append({"class": f"{kind.__module__}.{kind.__qualname__}", "frames": frames})
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return errors


def log_settings(level: str = "INFO") -> dict[str, Any]:
    """Settings for `logging.config.dictConfig`: one format for our records and uvicorn's."""
    own = {"handlers": ["stderr"], "level": level, "propagate": False}
    others = {**own, "level": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"parse_infer": own, "uvicorn": others, "asyncio": others},
    }
