"""A response that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

GONE = 499  # nginx's status for a client that disconnected, for logs and metrics


class CancellableResponse(Response):
    """Runs `work(send)`, which sends the whole response, and cancels `work` when the client disconnects.

    The framework answers errors that `work` raises before it sends anything.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
