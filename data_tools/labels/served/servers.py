"""Concurrent completions from OpenAI-compatible servers of one model, with retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

from openai import APIError, AsyncOpenAI, Timeout

from data_tools.labels.served.completions import Answer, BrokenAnswer, Request, read_answer, read_models
from data_tools.labels.served.retry import RetryPolicy, is_away, reason

_CONNECT = 5.0  # seconds


class CompletionServers:
    """Replicas that serve one model. The API key is the environment variable OPENAI_API_KEY.

    Args:
        urls: base addresses, with /v1.
        model: the model's name on the servers.
        concurrency: maximum number of requests in flight; only these requests are in memory.
        timeout: seconds for one answer.
        retries, max_outage: see `RetryPolicy`. The next attempt goes to the next server.
        note: called with a message when a server becomes unavailable, and when the server recovers.
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
        """Send the requests in order, and return the answers in the same order.

        Raises:
            ConnectionError, ValueError: one request got no answer, see `RetryPolicy.wait`.
        """
        return asyncio.run(self._complete(requests))

    def models(self, url: str) -> dict[str, int | None]:
        """Return `read_models` of one server, without retries. Raises the client's errors and BrokenAnswer."""

        async def ask() -> str:
            async with self._client(url) as client:
                return (await client.models.with_raw_response.list()).http_response.text

        return read_models(asyncio.run(ask()))

    def try_out(self, url: str, request: Request) -> Answer:
        """Return the answer of one server, without retries. Raises the client's errors and BrokenAnswer."""

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
            except ExceptionGroup as failures:  # the first failure cancelled the other tasks
                raise failures.exceptions[0] from None
        return [answers[number] for number in range(len(answers))]

    async def _answer(self, clients: Sequence[AsyncOpenAI], request: Request) -> Answer:
        policy = RetryPolicy(self.retries, self.max_outage)
        for attempt in count(request.home):
            url, client = self.urls[attempt % len(clients)], clients[attempt % len(clients)]
            try:
                answer = await self._ask(client, request)
            except (APIError, BrokenAnswer) as error:
                seconds = policy.wait(url, error)
                self._report_outage(url, away=reason(error) if is_away(error) else None)
                await asyncio.sleep(seconds)
            else:
                self._report_outage(url, away=None)
                return answer
        raise AssertionError("attempts do not end")

    async def _ask(self, client: AsyncOpenAI, request: Request) -> Answer:
        body = request.body()
        # The client would accept an incomplete answer, so `read_answer` parses the raw response.
        response = await client.completions.with_raw_response.create(
            model=self.model, prompt=body.pop("prompt"), extra_body=body
        )
        return read_answer(response.http_response.text, request)

    def _report_outage(self, url: str, away: str | None) -> None:
        """Report once that a server is unavailable, and once that the server recovered."""
        if away is not None and url not in self._away:
            self._away.add(url)
            self.note(f"{url} is unavailable ({away}): retrying for {self.max_outage:g} s at most")
        elif away is None and url in self._away:
            self._away.remove(url)
            self.note(f"{url} is available again")

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[AsyncOpenAI]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._client(url)) for url in self.urls]

    def _client(self, url: str) -> AsyncOpenAI:
        """Return a client without retries, because the client does not distinguish outages from failed requests."""
        key = os.environ.get("OPENAI_API_KEY") or "none"
        timeout = Timeout(self.timeout, connect=min(_CONNECT, self.timeout))
        return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout)
