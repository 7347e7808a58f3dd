"""One model behind OpenAI-compatible servers: many completions at a time, asked for again until they are there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

from openai import APIError, AsyncOpenAI, Timeout

from data_tools.labels.served.completions import Answer, BrokenAnswer, Request, read_answer, read_models
from data_tools.labels.served.retry import Patience, is_away, reason

_CONNECT = 5.0  # seconds


class CompletionServers:
    """Replicas that serve one model. The API key is the environment variable OPENAI_API_KEY.

    Args:
        urls: base addresses, with /v1.
        model: its name on the servers.
        concurrency: requests in flight; no more requests than these exist at a time.
        timeout: seconds for one answer.
        retries, max_outage: what is done about failures and outages, see `Patience`. The next attempt goes to the next
            server.
        note: told when a server is away, and when it is back.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
        max_outage: float = 900.0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.urls, self.model, self.concurrency, self.timeout = list(urls), model, concurrency, timeout
        self.retries, self.max_outage = retries, max_outage
        self.note = note
        self._away: set[str] = set()

    def complete(self, requests: Iterable[Request]) -> list[Answer]:
        """The answers, in order. Requests go out in order too.

        Raises:
            ConnectionError, ValueError: one request got no answer, see `Patience.wait`.
        """
        return asyncio.run(self._complete(requests))

    def models(self, url: str) -> dict[str, int | None]:
        """What `read_models` says about one server, asked once. Raises what the client raises, and BrokenAnswer."""

        async def ask() -> str:
            async with self._client(url) as client:
                return (await client.models.with_raw_response.list()).http_response.text

        return read_models(asyncio.run(ask()))

    def try_out(self, url: str, request: Request) -> Answer:
        """The answer of one server, asked once. Raises what the client raises, and BrokenAnswer."""

        async def ask() -> Answer:
            async with self._client(url) as client:
                return await self._ask(client, request)

        return asyncio.run(ask())

    async def _complete(self, requests: Iterable[Request]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = enumerate(requests)
        async with self._clients() as clients:

            async def work() -> None:
                for number, request in waiting:
                    answers[number] = await self._answer(clients, request)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.concurrency):
                        group.create_task(work())
            except ExceptionGroup as failures:  # the first one has ended the others
                raise failures.exceptions[0] from None
        return [answers[number] for number in range(len(answers))]

    async def _answer(self, clients: Sequence[AsyncOpenAI], request: Request) -> Answer:
        patience = Patience(self.retries, self.max_outage)
        for attempt in count(request.home):
            url, client = self.urls[attempt % len(clients)], clients[attempt % len(clients)]
            try:
                answer = await self._ask(client, request)
            except (APIError, BrokenAnswer) as error:
                seconds = patience.wait(url, error)
                self._keep_account(url, away=reason(error) if is_away(error) else None)
                await asyncio.sleep(seconds)
            else:
                self._keep_account(url, away=None)
                return answer
        raise AssertionError("attempts do not end")

    async def _ask(self, client: AsyncOpenAI, request: Request) -> Answer:
        body = request.body()
        # Read here, not by the client, which takes half an answer for a whole one.
        response = await client.completions.with_raw_response.create(
            model=self.model, prompt=body.pop("prompt"), extra_body=body
        )
        return read_answer(response.http_response.text, request)

    def _keep_account(self, url: str, away: str | None) -> None:
        """Tell once that a server is away, and once that it is back."""
        if away is not None and url not in self._away:
            self._away.add(url)
            self.note(f"{url} is away ({away}): asking again for {self.max_outage:g} s at most")
        elif away is None and url in self._away:
            self._away.remove(url)
            self.note(f"{url} is back")

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[AsyncOpenAI]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._client(url)) for url in self.urls]

    def _client(self, url: str) -> AsyncOpenAI:
        """Without retries of its own: it cannot tell a server that starts again from one that fails."""
        key = os.environ.get("OPENAI_API_KEY") or "none"
        timeout = Timeout(self.timeout, connect=min(_CONNECT, self.timeout))
        return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout)
