"""Errors in the format of OpenAI's API: a status and a one-sentence message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from parse_infer.suggest import closest

_NAMES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every response with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with this status and message.

    Args:
        param: the invalid field of the body.
        code: machine-readable error code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        # ASCII only: a message may quote invalid UTF-8.
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


@contextmanager
def value_errors_as_400(param: str | None = None) -> Iterator[None]:
    """Turn a ValueError of the block into a 400 error."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_value", param) from error


async def answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer errors of the framework: unknown paths, wrong methods and invalid JSON."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"this server has no route {request.method} {request.url.path[:100]}"
    elif error.status_code == 405:
        message = f"{request.url.path[:100]} does not allow {request.method[:20]}"
    elif error.status_code == 400:
        message = "the body is not valid JSON in UTF-8"
    return ApiError(error.status_code, message, _NAMES.get(error.status_code), headers=error.headers).response()


async def answer_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    is_json = "json" in request.headers.get("content-type", "")
    return invalid_body(error.errors(), is_json).response()


def failure() -> ApiError:
    """The 500 error of an internal failure; the log has the traceback."""
    return ApiError(500, "the server failed on this request; its log has the details", "internal_error")


def unknown_field(name: str, known: Iterable[str]) -> ApiError:
    """The error of a field that is none of the `known` ones beside it."""
    close = closest(name.rpartition(".")[2], known)
    advice = f"did you mean {close!r}?" if close else "leave it out"
    return ApiError(400, f"unknown field {name}: {advice}", "unknown_field", name)


def unsupported_field(problems: Sequence[Mapping[str, Any]]) -> str | None:
    """The first field with a value that is valid, but not supported here; None: there is none."""
    return next((".".join(_place(problem)) for problem in problems if problem["type"] == "unsupported"), None)


def _place(problem: Mapping[str, Any]) -> list[str]:
    place = [str(part)[:60] for part in problem["loc"][1:]]
    # Drop the names of union types ("str", "list[int]") between the fields.
    return [part for part in place if part != "str" and "[" not in part]


def invalid_body(problems: Sequence[Mapping[str, Any]], is_json: bool = True) -> ApiError:
    """One sentence on the most deeply nested problem: of a union's types, that is the type meant.

    A list that is too long is of the type meant too.
    """
    first = max(problems, key=lambda problem: (len(problem["loc"]), problem["type"] == "too_long"))
    place = _place(first)
    kind, text = first["type"], str(first["msg"])
    if kind == "unknown":
        return unknown_field(".".join([*place, first["ctx"]["name"]]), first["ctx"]["known"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", "invalid_json")
    if kind == "unsupported":
        return ApiError(400, f"{'.'.join(place)}: {text}", "unsupported_value", ".".join(place))
    if kind == "sentence":  # the message begins with the field's name
        field = ".".join([*place, text.partition(":")[0]])
        return ApiError(400, ".".join([*place, text]), "invalid_value", field)
    if kind == "string_unicode":
        where = ".".join(place) or "the name of a field"
        return ApiError(400, f"{where} is not Unicode: it has half of a surrogate pair", "invalid_value", where)
    if not place:
        expected = "a JSON object" if is_json else "a JSON object, with the header Content-Type: application/json"
        return ApiError(400, f"the body must be {expected}", "invalid_json")
    name = ".".join(place)
    if kind == "missing":
        message = f"{name} is missing"
    else:
        text = text.removeprefix("Value error, ")
        message = f"{name}: {text[:1].lower()}{text[1:]}"
    return ApiError(400, message, "missing_field" if kind == "missing" else "invalid_value", name)
