"""Logs as one JSON object a line, on standard error: never with a text of a request or an answer."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is being answered: in its lines of the log, in its response's header and in the name of its
answer."""


class JsonLines(logging.Formatter):
    """Time, level, what happened, the request, and the fields given as `extra={"fields": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().partition("\n")[0],  # asyncio quotes exceptions in later lines
        }
        if number := request_id.get():
            line["id"] = number
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["errors"] = describe_error(record.exc_info[1])
        return json.dumps(line)


def describe_error(error: BaseException) -> list[dict[str, Any]]:
    """The class of an exception and the frames that it passed, then those of its causes. Its message is left out: it
    may quote a request or an answer."""
    found, seen = list[dict[str, Any]](), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = [
            f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
            for frame, line in traceback.walk_tb(cause.__traceback__)
        ]
        kind = type(cause)
        found.append({"class": f"{kind.__module__}.{kind.__qualname__}", "frames": frames})
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def log_settings(level: str = "INFO") -> dict[str, Any]:
    """For `logging.config.dictConfig`: our own records and uvicorn's, in one form."""
    own = {"handlers": ["stderr"], "level": level, "propagate": False}
    others = {**own, "level": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"parse_infer": own, "uvicorn": others, "asyncio": others},
    }
