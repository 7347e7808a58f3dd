"""Does a promise still hold? On a small share of the requests the target alone answers too, afterwards."""

from __future__ import annotations

import asyncio
import logging
import operator
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from parse_infer.events import Done
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.drift import DriftTest
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.runner import Runner
from parse_infer.settings import GenerationSettings

log = logging.getLogger("parse_infer.serve")


@dataclass(frozen=True)
class RiskMonitor:
    """What a server promises, and how closely it is watched."""

    risk: float | None = None
    """Of the requests that name none, where the calibration covers them."""
    audit: float = 0.0
    """Share of the answers under a promise that are compared with the target's own."""
    same: Callable[[str, str], bool] = operator.eq
    """Whether two texts give the same final answer."""

    @property
    def expected(self) -> GenerationSettings:
        """Of a request that names nothing, with room for an answer of any length."""
        return GenerationSettings(1 << 31, risk=self.risk)


class Audit:
    """Compares final answers with the target's own, and raises the alarm when they differ more often than promised.

    Nobody tells here whether an answer is right; that it is not the target's own can be seen, and the calibration
    knows how often that may be. One audit runs at a time; what would have to wait is not audited.

    Raises:
        ValueError: a share that is none, or no calibration.
    """

    def __init__(self, backend: Runner, metrics: Metrics, promises: RiskMonitor) -> None:
        calibration = backend.calibration
        if not 0 < promises.audit <= 1:
            raise ValueError(f"--audit is {promises.audit}; give a share of the requests, such as 0.01")
        if calibration is None:
            raise ValueError("--audit watches the promises of a calibration, and there is none: give --calibration")
        self._backend = backend
        self._metrics = metrics
        self._calibration = calibration
        self._promises = promises
        self._tests = {
            risk: DriftTest(calibration.disagreement(risk), 1 - calibration.confidence)
            for risk, place in calibration.promises.items()
            if place is not None and calibration.disagreement(risk) < 1
        }
        self._task: asyncio.Task[None] | None = None

    def consider(self, choice: ChoiceState) -> None:
        """An answer has ended."""
        risk = None if choice.answer.fallback else choice.job.settings.risk  # the target's own is no evidence
        if risk not in self._tests or (self._task is not None and not self._task.done()):
            return
        if random.random() < self._promises.audit:
            self._task = asyncio.create_task(self._audit(choice, risk))

    async def _audit(self, choice: ChoiceState, risk: float) -> None:
        text = ""
        try:
            async with aclosing(self._backend.stream(replace(choice.job, alone=True))) as moments:
                async for moment in moments:
                    if isinstance(moment.event, Done):
                        text = moment.event.generation.text
        except Exception:
            log.exception("audit failed")
            return
        differs = not self._promises.same(choice.answer.text, text)
        test = self._tests[risk]
        known = test.implausible
        test.see(differs)
        self._metrics.audited.labels(str(risk), "differs" if differs else "same").inc()
        self._metrics.evidence.labels(str(risk)).set(test.evidence)
        self._metrics.implausible.labels(str(risk)).set(test.implausible)
        if test.implausible and not known:
            fields = {
                "risk": risk,
                "audited": test.observations,
                "differing": test.events,
                "allowed": self._calibration.disagreement(risk),
                "confidence": self._calibration.confidence,
            }
            log.warning("promise implausible: calibrate on requests of today", extra={"fields": fields})
