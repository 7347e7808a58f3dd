"""The coordinator behind the server: vLLM answers many jobs at the same time, on the event loop of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from parse_infer.coordinator import client
from parse_infer.coordinator.engine import Coordinator
from parse_infer.serve.backend import Job, Moment, Refused
from parse_infer.serve.reader import PromptReader


class CoordinatedBackend(PromptReader):
    """A `Backend` for one `Coordinator`, which nobody else may use from now on."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator.target, coordinator.draft)
        self.parallel = coordinator.parallel
        self.threshold = coordinator.threshold
        self.calibration = coordinator.calibration
        self._coordinator = coordinator
        self._room = asyncio.Semaphore(coordinator.parallel)

    @property
    def running(self) -> int:
        return self._coordinator.running

    def check_calibration(self) -> None:
        self._coordinator.check_calibration()

    async def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        draft = None
        if (text := job.draft_text) is not None:
            draft = await self.ask(lambda own: self._coordinator.read_draft(text, job.prompt, own))
        try:
            events = self._coordinator.events(job.prompt, job.settings, draft, job.alone, job.watched)
        except ValueError as error:
            raise Refused(str(error)) from error
        async with self._room, aclosing(events):
            async for event in events:
                yield Moment(event, time.perf_counter())

    async def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        try:
            async with self._room, aclosing(self._coordinator.relay(fields)) as pieces:
                async for piece in pieces:
                    yield piece
        except client.Refused as error:
            raise Refused(error.sentence) from error

    def close(self) -> None:
        """No jobs follow; servers that were started for this end."""
        super().close()
        self._coordinator.close()
