"""Read the JSON of large bodies one at a time, with pauses in which the event loop serves other requests."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

LARGE = 1 << 16  # bytes; fewer take milliseconds

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ReadingRoute(APIRoute):
    """A route whose handler gets a `JsonRequest`."""

    def get_route_handler(self) -> Handler:
        handle = self.handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read

    def handler(self) -> Handler:
        return super().get_route_handler()


class JsonRequest(Request):
    """A request that waits for its turn, the lock `app.state.reading`, to read a large body.

    No thread reads it, because every parser keeps Python's interpreter lock.
    """

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) < LARGE:
                return await super().json()
            async with self.app.state.reading:
                begin = time.perf_counter()
                try:
                    self._json = _parsed(body)
                finally:
                    await asyncio.sleep(time.perf_counter() - begin)  # half of the time is for all other requests
        return self._json


def _parsed(body: bytes) -> object:
    gc.disable()  # a million lists would be walked again and again
    try:
        return from_json(body)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    finally:
        gc.enable()
