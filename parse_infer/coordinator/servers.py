"""Several servers with the same model: who is asked, and what happens when one does not answer.

Every request holds all of its state, so one that is lost is asked again, of another server or of the same one when it
is back; of a text that has begun only the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from parse_infer.coordinator.client import Client, Lost, Refused

log = logging.getLogger("parse_infer.coordinator")

ATTEMPTS = 4  # of one request, each with a server that seemed well
PATIENCE_S = 120.0  # while no server is well
_PULSE_S = 0.5
_SAMPLE = "Natalia sold 48/2 = 24 clips.\n\n  Überall, 数学: {x²} #### 1,072\t<b>"


class Unavailable(OSError):
    """No server answers."""


class Server:
    """One of them.

    Attributes:
        url: without "/v1".
        busy: answers and requests that it works on for us.
        well: whether it answered last time.
        trouble: why it did not.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.busy = 0
        self.well = True
        self.trouble = ""


class Servers:
    """
    Args:
        role: for messages: "target" or "draft".
        urls: at least one.
        failure: says why the servers will not come back, once that is known (None: they may).
        patience_s: how long a request waits while no server is well.

    Attributes:
        model: the name under which they serve it; known after `meet`.
        window: tokens that prompt and answer may have together there; known after `meet`.
        fields: of every request.
    """

    def __init__(
        self,
        role: str,
        urls: Sequence[str],
        client: Client,
        failure: Callable[[], str | None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if not urls:
            raise ValueError(f"no address of a {role} server was given")
        self.role = role
        self.members = [Server(url) for url in urls]
        self.model = ""
        self.window = 0
        self.fields: dict[str, Any] = {}
        self._client = client
        self._failure = failure
        self._patience_s = patience_s
        self._watching: set[asyncio.Task[None]] = set()
        self._recovered: asyncio.Event | None = None

    async def meet(self) -> list[Server]:
        """Ask each server what it serves.

        Returns:
            Those that answer. The others are asked again with the first request that would go to them.

        Raises:
            Unavailable: none answers.
            ValueError: they serve different models.
        """
        found, there, away = [], [], []
        for server in self.members:
            try:
                (listed, *_) = (await self._client.get(f"{server.url}/v1/models"))["data"]
                found.append((str(listed["id"]), int(listed.get("max_model_len") or 0)))
                there.append(server)
            except Lost as error:
                away.append(f"the {self.role} server {error}: start it, or correct {self.role}_url")
            except Refused:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"the {self.role} server {server.url} is no OpenAI-compatible server") from error
        if not found:
            raise Unavailable(away[0])
        for sentence in away:
            log.warning(sentence)
        names = sorted({name for name, _ in found})
        if len(names) > 1:
            raise ValueError(f"the {self.role} servers serve different models: {' and '.join(names)}")
        self.model, self.window = names[0], min(window for _, window in found)
        return there

    def forget_troubles(self) -> None:
        """All are taken for well; for the next event loop, as watching belongs to one."""
        self.close()
        self._recovered = None
        for server in self.members:
            server.well = True

    async def check_tokens(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """ValueError where a server tells that it cuts text into other tokens than the model `name`."""
        wanted = tokenizer.encode(_SAMPLE, add_special_tokens=False)
        body = {"model": self.model, "prompt": _SAMPLE, "add_special_tokens": False}
        for server in self.members:
            try:
                found = (await self._client.post(f"{server.url}/tokenize", body))["tokens"]
            except (Lost, Refused, KeyError, TypeError):  # only vLLM has this path
                continue
            if found != wanted:
                raise ValueError(
                    f"the {self.role} server {server.url} has other tokens than {name!r}: give the address of a "
                    "server with that model"
                )

    @contextmanager
    def place(self) -> Iterator[Server]:
        """The server with the least to do, for all requests of an answer: it keeps what it has read."""
        server = self._choose()
        server.busy += 1
        try:
            yield server
        finally:
            server.busy -= 1

    def _choose(self) -> Server:
        return min([s for s in self.members if s.well] or self.members, key=lambda server: server.busy)

    async def ask(self, body: dict[str, Any], prefer: Server | None = None) -> Any:
        """The answer to a completion request of one token for each prompt.

        Raises:
            Unavailable: no server gives one.
            Refused: a server does not accept it.
        """
        return await self._tried(
            lambda url: self._client.post(url, {"model": self.model} | body | self.fields), prefer
        )

    async def written(
        self,
        ids: Sequence[int],
        most: int,
        settings: dict[str, Any],
        prefer: Server | None = None,
        watched: bool = True,
    ) -> AsyncGenerator[list[int], None]:
        """What the model writes behind `ids`, `most` tokens at most: as it comes if it is `watched`, else at once,
        which costs less. Raises as `ask` does."""
        if not watched:
            body = self._body(ids, most, settings)
            yield await self._tried(lambda url: self._client.whole(url, body), prefer)
            return
        got: list[int] = []
        for _ in range(ATTEMPTS):
            server = await self._well(prefer)
            body = self._body([*ids, *got], most - len(got), settings)
            if "min_tokens" in settings:  # of the whole text
                body["min_tokens"] = max(0, settings["min_tokens"] - len(got))
            server.busy += 1
            try:
                async with aclosing(self._client.written(f"{server.url}/v1/completions", body)) as pieces:
                    async for piece in pieces:
                        got += piece
                        yield piece
                return
            except Lost as error:
                if len(got) >= most or (got and got[-1] in settings["stop_token_ids"]):
                    return  # all but the news that it has ended
                self._lose(server, str(error))
            finally:
                server.busy -= 1
        raise self._given_up(server)

    async def relayed(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """What a server answers to a request of somebody else's, an object or those of a stream. Raises as `ask` does;
        a stream that has begun is not asked for again."""
        body = {"model": self.model} | body | self.fields
        if not body.get("stream"):
            yield await self._tried(lambda url: self._client.post(url, body), None, path)
            return
        begun = False
        for _ in range(ATTEMPTS):
            server = await self._well(None)
            server.busy += 1
            try:
                async with aclosing(self._client.chunks(f"{server.url}{path}", body)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Lost as error:
                self._lose(server, str(error))
                if begun:
                    break
            finally:
                server.busy -= 1
        raise self._given_up(server)

    def close(self) -> None:
        for task in self._watching:
            task.cancel()

    def _body(self, ids: Sequence[int], most: int, settings: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "prompt": list(ids), "max_tokens": most, **settings, **self.fields}

    async def _tried(self, request: Callable[[str], Any], prefer: Server | None, path: str = "/v1/completions") -> Any:
        for _ in range(ATTEMPTS):
            server = await self._well(prefer)
            server.busy += 1
            try:
                return await request(f"{server.url}{path}")
            except Lost as error:
                self._lose(server, str(error))
            finally:
                server.busy -= 1
        raise self._given_up(server)

    async def _well(self, prefer: Server | None) -> Server:
        """A server to ask, as soon as one is well. Raises Unavailable where none will be."""
        end = time.monotonic() + self._patience_s
        while not any(server.well for server in self.members):
            reason = self._failure()
            if reason is not None or time.monotonic() > end:
                raise Unavailable(f"no {self.role} server answers: {reason or self.members[-1].trouble}")
            assert self._recovered is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._recovered.wait(), _PULSE_S)
        return prefer if prefer is not None and prefer.well else self._choose()

    def _given_up(self, server: Server) -> Unavailable:
        return Unavailable(f"the {self.role} servers have failed {ATTEMPTS} times: {server.trouble}")

    def _lose(self, server: Server, trouble: str) -> None:
        server.trouble = trouble
        if not server.well:
            return
        server.well = False
        self._recovered = self._recovered or asyncio.Event()
        self._recovered.clear()
        task = asyncio.get_running_loop().create_task(self._watch(server))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, server: Server) -> None:
        """Until it is well again."""
        for n in itertools.count():
            await asyncio.sleep(_PULSE_S if n > 3 else 0.05 * 2**n)
            try:
                await self._client.get(f"{server.url}/health")
            except Lost:
                continue
            except Refused:  # without such a path; but there it is
                pass
            break
        server.well = True
        assert self._recovered is not None
        self._recovered.set()
