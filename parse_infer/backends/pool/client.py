"""HTTP client of OpenAI-compatible servers: completions in token ids, streamed or whole."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from parse_infer.backends.pool.origin import origin_headers
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.backends.pool.retry_after import read_retry_after
from parse_infer.backends.pool.server_sent_events import event_data
from parse_infer.backends.servers.dialects.dialect import COMPLETIONS, Call
from parse_infer.errors import ServerError

_ROUTES = (COMPLETIONS, "/v1/chat/completions", "/tokenize")  # of every server
KEEP_ALIVE_S = 3.0  # of an idle connection; vLLM closes it after 5 s and could lose a request
_CONNECT_S = 5.0
_ABORT_S = 1.0
_KEY_HINT = "give its API key with --server-key, api_key or VLLM_API_KEY"


class TransientServerError(Exception):
    """The server sent no complete answer; a retry may help. The message goes into logs, so it quotes no response.

    Attributes:
        status: HTTP status of the failure; 0: no answer, or an unusable one.
        timed_out: the server sent nothing for too long.
        retry_after_s: how long the server asks for no requests; None: it does not say.
        unread: the server did not start the request: it was unreachable or overloaded.
    """

    def __init__(
        self,
        message: str,
        status: int = 0,
        timed_out: bool = False,
        retry_after_s: float | None = None,
        unread: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.timed_out, self.retry_after_s = status, timed_out, retry_after_s
        self.unread = unread or status in (429, 503)


class RequestRejected(ServerError):
    """The server rejects the request, and a retry would not help.

    Attributes:
        sentence: the server's own message, without its address.
        status: HTTP status; 0: the server accepted the request, but its answer is unusable.
    """

    def __init__(self, message: str, sentence: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.sentence = sentence or message
        self.status = status


class Client:
    """HTTP client of one model's servers, with one session per event loop, opened on first use.

    It follows no redirect, which could take the key or a prompt to another host.

    Args:
        api_key: API key of the servers, if they need one.
        timeout_s: how long a server may send nothing; None: as long as the caller waits.
        key_hint: how to give another key, for messages.
    """

    def __init__(self, api_key: str | None = None, timeout_s: float | None = None, key_hint: str = _KEY_HINT) -> None:
        self._timeout_s, self._key_hint = timeout_s, key_hint
        self._headers = {"Accept-Encoding": "identity"}  # answers are read as they come
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Send a `POST` and return its JSON. Raises TransientServerError or RequestRejected."""
        async with self._answer("POST", url, body, headers) as response:
            return _parsed(await response.read(), url)

    async def get(self, url: str) -> Any:
        """Send a `GET` and return its JSON. Raises as `post` does."""
        async with self._answer("GET", url) as response:
            return _parsed(await response.read(), url)

    async def text(self, url: str) -> str:
        """Send a `GET` and return its text. Raises as `post` does."""
        async with self._answer("GET", url) as response:
            return (await response.read()).decode(errors="replace")

    async def written(
        self,
        url: str,
        body: dict[str, Any],
        confidences: list[float] | None = None,
        abort: Call | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Stream the tokens of one prompt. Closing the generator aborts the request.

        Args:
            confidences: takes the probability of each token, if the body asks for log-probabilities.
            abort: sent before the connection of an unfinished stream is closed, see `Dialect.abort`.

        Raises TransientServerError (also if the stream ends before the text) or RequestRejected.
        """
        ended = False
        body = body | {"stream": True, "return_token_ids": True}
        async with (
            self._answer("POST", url, body, headers) as response,
            aclosing(event_data(response.content.iter_any())) as events,
        ):
            try:
                async for event in events:
                    if event == b"[DONE]":
                        break
                    choice = _choice(_parsed(event, url), url)
                    if choice is None:
                        continue
                    ended = ended or choice.get("finish_reason") is not None
                    if choice["token_ids"]:
                        if confidences is not None:
                            confidences += _probabilities(choice)
                        yield choice["token_ids"]
                    _check_end(choice, url)
            except (GeneratorExit, asyncio.CancelledError):
                if abort is not None and not ended:
                    await self._abort(url.removesuffix(COMPLETIONS) + abort.path, abort.body)
                raise
        if not ended:
            raise TransientServerError(f"{url} closed the connection in the middle of an answer")

    async def _abort(self, url: str, body: dict[str, Any]) -> None:
        """Send a `POST` that ends a stream, and ignore its failure."""
        with suppress(TimeoutError, TransientServerError, RequestRejected):
            async with asyncio.timeout(_ABORT_S):
                await self.post(url, body)

    async def whole(self, url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> list[int]:
        """Return the tokens of one prompt all at once."""
        answer = await self.post(url, body | {"return_token_ids": True}, headers)
        choice = _choice(answer, url)
        if choice is None or choice["token_ids"] is None:
            raise TransientServerError(f"{url} sent a response without tokens")
        _check_end(choice, url)
        ids: list[int] = choice["token_ids"]
        return ids

    async def chunks(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Stream the JSON objects of a response unchanged. Raises as `written` does."""
        async with (
            self._answer("POST", url, body, headers) as response,
            aclosing(event_data(response.content.iter_any())) as events,
        ):
            async for event in events:
                if event == b"[DONE]":
                    return
                chunk = _parsed(event, url)
                if not isinstance(chunk, dict):
                    raise TransientServerError(f"{url} sent no completion")
                if chunk.get("error"):
                    raise TransientServerError(f"{url} failed in the middle of an answer")
                yield chunk
        raise TransientServerError(f"{url} closed the connection in the middle of an answer")

    async def passed(self, request: PassedRequest, server: str) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Send a request as it is; yield the head of the response, then the pieces of its body unchanged.

        A rejection of the request is a response too. Where the client wants no stream, the body is read before the
        head is yielded, so that a response cut off can be retried. Raises TransientServerError for failures of the
        server, and RequestRejected where the server rejects our key or address.
        """
        ours = request.path.partition("?")[0] in _ROUTES
        passes = partial(_concerns_request, every_server_has_route=ours)
        url = f"{server}{request.path}"
        async with self._answer(request.method, url, request.body, request.headers, passes) as response:
            head = ResponseHead.of(response.status, response.raw_headers)
            if not request.streams and not head.is_event_stream:
                content = await response.read()
                yield head
                yield content
                return
            yield head
            async for piece in response.content.iter_any():
                yield piece

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()
        elif session is not None and session.connector is not None:  # its loop has ended
            with suppress(RuntimeError):
                await session.connector.close()
            session.detach()

    def _answer(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        passes: Callable[[int], bool] = lambda status: False,
    ) -> _Response:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeout_s)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False
            )
            self._loop = loop
        return _Response(self._session, method, url, body, headers or {}, passes, self._key_hint)


class _Response:
    """`async with` context of a response; connection errors become `TransientServerError`.

    Args:
        body: None or empty: there is none.
        passes: whether a response without success is returned too, by its status.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: dict[str, Any] | bytes | None,
        headers: Mapping[str, str],
        passes: Callable[[int], bool],
        key_hint: str,
    ) -> None:
        data = (to_json(body) if isinstance(body, dict) else body) or None
        own = {} if data is None else {"content-type": "application/json"}
        own |= {} if body is None else origin_headers()
        self._request = session.request(
            method,
            url,
            data=data,
            headers=own | {**headers},
            skip_auto_headers=("Content-Type",),  # of a request without a body
            allow_redirects=False,
        )
        self._url, self._passes, self._key_hint = url, passes, key_hint
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._response = response = await self._request
            if 200 <= response.status < 300 or self._passes(response.status):
                return response
            body = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken("does not answer", error) from error
        if 300 <= response.status < 400:
            place = response.headers.get("Location", "nowhere")[:200]
            sentence = f"redirects to {place}: give the address behind it"
            raise RequestRejected(f"{self._url} {sentence}", sentence, response.status)
        if 400 <= response.status < 500 and response.status not in (408, 429):
            sentence = _message(body)
            hint = f": {self._key_hint}" if response.status in (401, 403) else ""
            message = f"{self._url} rejects a request ({response.status}): {sentence}{hint}"
            raise RequestRejected(message, sentence, response.status)
        wait_s = read_retry_after(response.headers.get("Retry-After"), time.time())
        message = f"{self._url} failed ({response.status})"
        raise TransientServerError(message, response.status, retry_after_s=wait_s)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._response is None:
            return
        if kind is None and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()  # drop the rest of the response
        if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError)):
            raise self._broken("closed the connection", error) from error

    def _broken(self, what: str, error: Exception) -> TransientServerError:
        message = f"{self._url} {what}: {error or type(error).__name__}"
        unread = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        return TransientServerError(message, timed_out=isinstance(error, aiohttp.SocketTimeoutError), unread=unread)


def _concerns_request(status: int, every_server_has_route: bool) -> bool:
    """Whether a rejection concerns the request, not our key or address (401, 403, 404) or the server's load.

    vLLM answers 501 where the model has no use for a route.
    """
    if status == 404:
        return not every_server_has_route
    return status == 501 or (400 <= status < 500 and status not in (401, 403, 408, 429))


def _parsed(content: bytes, url: str) -> Any:
    with suppress(ValueError):
        return from_json(content)  # in a fraction of the time of `json`, which also reads half of a surrogate pair
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TransientServerError(f"{url} sent incomplete JSON ({len(content)} bytes)") from error


def _check_end(choice: Mapping[str, Any], url: str) -> None:
    """Raise TransientServerError if the server ended the answer for a reason of its own, such as its shutdown."""
    if choice.get("finish_reason") in ("abort", "error"):
        raise TransientServerError(f"{url} ended an answer with finish_reason {choice['finish_reason']!r}")


def _choice(answer: object, url: str) -> dict[str, Any] | None:
    """The first choice of a response or chunk, or None without choices."""
    if not isinstance(answer, dict):
        raise TransientServerError(f"{url} sent no completion")
    if answer.get("error"):
        raise TransientServerError(f"{url} answered with an error")
    try:
        choice = next(iter(answer["choices"]), None)
        if choice is not None and "token_ids" not in choice:
            raise RequestRejected(
                f"{url} returns no token ids (return_token_ids): use vLLM 0.10.2 or later, or a recent SGLang"
            )
        return choice
    except (KeyError, TypeError) as error:
        raise TransientServerError(f"{url} sent no completion") from error


def _probabilities(choice: dict[str, Any]) -> list[float]:
    """The probability of each token of a chunk; empty if the server lists none."""
    listed = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return [math.exp(value) for value in listed if isinstance(value, (int, float))]


def _message(body: str) -> str:
    """The message in an error's body."""
    try:
        content = json.loads(body)
        error = content.get("error", content.get("detail", content))
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return " ".join(body.split())[:300]
