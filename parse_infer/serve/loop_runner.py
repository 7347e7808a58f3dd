"""Runner over servers: concurrent jobs on the API server's event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager

from parse_infer.backends.pool import client
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.backends.pool.retries import Failing, Unavailable
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.drafters.text import TextDrafter
from parse_infer.engine import ParseEngine
from parse_infer.serve.errors import ApiError
from parse_infer.serve.runner import InvalidRequest, Job, Moment, Runner

log = logging.getLogger("parse_infer.serve")

PATIENCE_S = 2.0  # while no target replica is healthy; then the client gets 503 and can try another server
_RETRY_AFTER_S = 5
_INVALID = (400, 413, 422)  # a rejection is the client's mistake; others concern our key or address


class LoopRunner(Runner):
    """Has exclusive use of one `ParseEngine` over servers. Raises TypeError for an engine with another backend."""

    relays = True

    def __init__(self, engine: ParseEngine) -> None:
        if not isinstance(engine.backend, ServerBackend):
            raise TypeError(f"the engine has a {type(engine.backend).__name__}: give one over servers")
        super().__init__(engine.target, engine.draft)
        self._backend = engine.backend
        self.parallel = self._backend.parallel
        self.threshold = engine.threshold
        self.calibrations = engine.calibrations
        self._engine = engine
        self._audits = 0
        self._slots = asyncio.Semaphore(self.parallel)
        target = self._backend.servers["target"]
        target.patience_s = min(target.patience_s, PATIENCE_S)

    @property
    def running(self) -> int:
        return max(0, self._engine.running - self._audits)

    @property
    def gauges(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
        gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        for role, servers in self._backend.servers.items():
            gauges[f"parse_{role}_servers_healthy"] = f"Healthy replicas of the {role} model.", servers.count
        return gauges

    @property
    def pools(self) -> Mapping[str, ReplicaPool]:
        return self._backend.servers

    def check_calibrations(self) -> None:
        self._engine.check_calibrations()

    async def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        draft = None
        if (text := job.draft_text) is not None:
            draft = await self.ask(lambda own: TextDrafter(text, own, job.prompt), len(text))
        try:
            events = self._engine.events(job.prompt, job.settings, draft, alone=job.alone, streamed=job.streamed)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        with _server_errors():
            async with self._slots, aclosing(events):
                self._audits += job.audit
                try:
                    async for event in events:
                        yield Moment(event, time.perf_counter())
                finally:
                    self._audits -= job.audit

    async def relay(self, request: PassedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        with _server_errors():
            async with aclosing(self._backend.relay(request)) as pieces:
                with self._engine.in_flight(request.answers):
                    async for piece in pieces:
                        yield piece

    def unavailable(self) -> str | None:
        target = self._backend.servers["target"]
        target.watch()
        return None if target.count() else "no target server is healthy"

    def close(self) -> None:
        """Close the engine and stop the servers that it started."""
        super().close()
        self._engine.close()


@contextmanager
def _server_errors() -> Iterator[None]:
    """Answer 400 for what the target's server finds invalid, 502 for what it refuses otherwise, such as our key.

    Without a target server, or if a request fails on each attempt, answer 503 with Retry-After.
    """
    try:
        yield
    except client.RequestRejected as error:
        if error.status in _INVALID:
            raise InvalidRequest(error.sentence) from error
        log.error("no answer: the target's server rejects a request (%d)", error.status)
        message = (
            f"the target's server rejects this server's requests ({error.status}): "
            "the operator must check key and model name"
        )
        raise ApiError(502, message, "target_refuses") from error
    except Unavailable as error:
        log.error("no answer: %s", error)
        failing = isinstance(error, Failing)
        reason = "this model's servers failed" if failing else "no server of this model is available"
        wait_s = max(_RETRY_AFTER_S, math.ceil(error.retry_after_s))
        message = f"{reason}: try again in {wait_s} s"
        headers = {"Retry-After": str(wait_s)}
        raise ApiError(503, message, "target_unavailable", headers=headers) from error
