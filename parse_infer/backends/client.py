"""What is said to one OpenAI-compatible server, in token ids: completions, whole or as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import aiohttp

KEEP_ALIVE_S = 3.0  # of an idle connection. vLLM closes one after 5 s, and a request on its way would be lost then
_CONNECT_S = 5.0
_SILENCE_S = 600.0  # a request may wait for its turn that long


class TransientServerError(Exception):
    """The server has not answered, or not completely: another one, or the same a little later, may. What it has sent
    is no part of the message, which may come into a log."""


class RequestRejected(ValueError):
    """The server does not accept the request, and no other would.

    Attributes:
        sentence: the server's own, without its address.
        status: of its answer; 0: the answer was accepted, and cannot be used.
    """

    def __init__(self, message: str, sentence: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.sentence = sentence or message
        self.status = status


class Client:
    """HTTP for one event loop; made on first use there, for all servers together.

    Args:
        api_key: what the servers want to be sent, if anything.
    """

    def __init__(self, api_key: str | None = None) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """The JSON in the answer to a `POST`. Raises Lost or Refused."""
        async with self._answer("POST", url, body) as response:
            return _parsed(await _read(response), url)

    async def get(self, url: str) -> Any:
        """The same for a `GET`; None where the answer is empty, as that of /health is."""
        async with self._answer("GET", url) as response:
            content = await _read(response)
            return _parsed(content, url) if content else None

    async def written(self, url: str, body: dict[str, Any]) -> AsyncGenerator[list[int], None]:
        """Tokens of one prompt as they are written. Closing this ends the work, since vLLM notices.

        Raises Lost (also if the stream ends before the text does) or Refused.
        """
        ended = False
        body = body | {"stream": True, "return_token_ids": True}
        async with self._answer("POST", url, body) as response, aclosing(_events(response)) as events:
            async for event in events:
                if event == b"[DONE]":
                    break
                choice = _choice(_parsed(event, url), url)
                if choice is None:
                    continue
                if choice["token_ids"]:
                    yield choice["token_ids"]
                ended = ended or choice.get("finish_reason") is not None
        if not ended:
            raise TransientServerError(f"{url} has broken off in the middle of an answer")

    async def whole(self, url: str, body: dict[str, Any]) -> list[int]:
        """The same tokens at once."""
        answer = await self.post(url, body | {"return_token_ids": True})
        choice = _choice(answer, url)
        if choice is None or choice["token_ids"] is None:
            raise TransientServerError(f"{url} has answered without an answer")
        ids: list[int] = choice["token_ids"]
        return ids

    async def chunks(self, url: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The objects of a stream, whatever they hold. Raises as `written` does."""
        async with self._answer("POST", url, body) as response, aclosing(_events(response)) as events:
            async for event in events:
                if event == b"[DONE]":
                    return
                chunk = _parsed(event, url)
                if "error" in chunk:
                    raise TransientServerError(f"{url} has failed in the middle of an answer")
                yield chunk
        raise TransientServerError(f"{url} has broken off in the middle of an answer")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()
        elif session is not None and session.connector is not None:  # its loop has ended
            with suppress(RuntimeError):
                await session.connector.close()
            session.detach()

    def _answer(self, method: str, url: str, body: dict[str, Any] | None = None) -> _Answer:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False
            )
            self._loop = loop
        return _Answer(self._session, method, url, body)


class _Answer:
    """A response whose status is good, for an `async with`; errors of the connection become `TransientServerError`."""

    def __init__(self, session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None) -> None:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        self._request = session.request(method, url, data=data, headers=headers)
        self._url = url
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._response = response = await self._request
            if response.status == 200:
                return response
            said = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransientServerError(f"{self._url} does not answer: {error or type(error).__name__}") from error
        if 400 <= response.status < 500 and response.status not in (408, 429):
            sentence = _message(said)
            hint = ": give its API key with --server-key (or api_key)" if response.status == 401 else ""
            message = f"{self._url} refuses a request ({response.status}): {sentence}{hint}"
            raise RequestRejected(message, sentence, response.status)
        raise TransientServerError(f"{self._url} has failed ({response.status})")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._response is None:
            return
        if kind is None and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()  # whoever leaves early wants no more of it
        if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError)):
            raise TransientServerError(f"{self._url} has broken off: {error or type(error).__name__}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    return await response.read()


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events."""
    rest = b""
    async for piece in response.content.iter_any():
        *complete, rest = (rest + piece).split(b"\n\n")
        for event in complete:
            if event.startswith(b"data: "):
                yield event[6:].strip()


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise TransientServerError(f"{url} has sent what is no complete JSON, in {len(content)} bytes") from error


def _choice(answer: Any, url: str) -> Any:
    """The choice in an answer, or in a piece of one; None in a piece without any."""
    if isinstance(answer, dict) and "error" in answer:
        raise TransientServerError(f"{url} has answered with an error")
    try:
        choice = next(iter(answer["choices"]), None)
        if choice is not None and "token_ids" not in choice:
            raise RequestRejected(f"{url} tells no token ids (return_token_ids): use vLLM 0.10.2 or later")
        return choice
    except (KeyError, TypeError) as error:
        raise TransientServerError(f"{url} has sent what is no completion") from error


def _message(said: str) -> str:
    """The sentence in an error's body."""
    try:
        found = json.loads(said)
        found = found.get("error", found)
        return str(found["message"] if isinstance(found, dict) else found)[:300]
    except (ValueError, KeyError, AttributeError):
        return " ".join(said.split())[:300]
