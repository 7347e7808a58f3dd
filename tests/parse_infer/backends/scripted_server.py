"""A server whose model is a rule: any number of them answer many requests in known time, on a busy machine too."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from parse_infer.models.loading import LanguageModel
from tests.parse_infer.backends.fake_server import PIECE, FakeServer

LETTERS = range(65, 91)  # tokens


class Always:
    """Faults without end."""

    def __init__(self, fault: Any) -> None:
        self._fault = fault

    def popleft(self) -> Any:
        return self._fault


class ScriptedServer(FakeServer):
    """The next letter depends on the last three tokens and the length.

    Attributes:
        wrong_every: one in so many of its letters is not that of the rule; 0: none.
        broken: answers that `break_off` has cut.
        streaming: streams that are being written.
    """

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self.wrong_every = 0
        self.broken = 0
        self.streaming = 0
        self._open: set[Any] = set()

    def break_off(self) -> None:
        """Close all connections with an unfinished answer, as where a server is killed."""
        for transport in filter(None, list(self._open)):
            self.broken += 1
            self._loop.call_soon_threadsafe(transport.abort)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream") and not body.get("prompt_logprobs"):
            await asyncio.sleep(self.pause * math.ceil(body["max_tokens"] / PIECE))
        self._loop = asyncio.get_running_loop()
        transport = request.transport  # None once it is closed
        self._open.add(transport)
        self.streaming += bool(body.get("stream"))
        try:
            return await super().completions(request)
        finally:
            self.streaming -= bool(body.get("stream"))
            self._open.discard(transport)

    def _write(self, prompt: list[int], body: dict[str, Any]) -> Iterator[int]:
        ids = list(prompt)
        for _ in range(body["max_tokens"]):
            ids.append(self._next(ids))
            if body.get("listed") is not None:
                body["listed"].append(math.log(0.9))
            self.written += bool(body.get("stream"))
            yield ids[-1]

    def _next(self, ids: list[int]) -> int:
        number = sum((n + 2) * token for n, token in enumerate(ids[-3:])) + 7 * len(ids)
        wrong = self.wrong_every and number % self.wrong_every == 0
        return LETTERS[(number + bool(wrong)) % len(LETTERS)]

    def _read(self, prompt: list[int], k: int) -> dict[str, Any]:
        entries: list[dict[str, Any] | None] = [None]
        for n, token in enumerate(prompt[1:], 1):
            first = self._next(prompt[:n])
            others = [letter for letter in LETTERS if letter not in (first, token)][:k]
            listed = {first: -0.01} | {other: -5.0 - i for i, other in enumerate(others)}
            listed.setdefault(token, -20.0)
            ranked = sorted(listed, key=lambda id: -listed[id])
            entries.append({str(id): {"logprob": listed[id], "rank": ranked.index(id) + 1} for id in ranked})
        return {"index": 0, "token_ids": [1], "text": "", "finish_reason": "length", "prompt_logprobs": entries}
