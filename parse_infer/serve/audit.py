"""Audit of risk promises: the target alone also answers a small share of the requests, afterwards."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import aclosing
from dataclasses import replace

from parse_infer.calibration.promises import covering
from parse_infer.calibration.schema import Calibration
from parse_infer.errors import ParseError
from parse_infer.request.events import Done
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.runner import Runner
from parse_infer.serve.settings import RiskSettings
from parse_infer.settings.acceptance import check_share

log = logging.getLogger("parse_infer.serve")
_ALTERNATIVES = 8  # larger rates; each halves the distance to 1


class DriftTest:
    """Tests "an event has at most this rate", one observation at a time, valid after every observation.

    While the promise holds, the likelihood ratio of a larger rate to the promised rate has a mean of at most 1. So
    does a mean of such ratios. Such a mean ever reaches 1 / level with a probability of at most `level` (Ville's
    inequality; Ramdas et al., arXiv 2210.01948), so frequent looks do no harm.

    Args:
        rate: the promised upper bound.
        level: probability of a false alarm over all observations.
    """

    def __init__(self, rate: float, level: float) -> None:
        check_share(rate, "rate")
        check_share(level, "level")
        larger = [1 - (1 - rate) * (1 - 0.5**k) for k in range(1, _ALTERNATIVES + 1)]
        self._happened = [math.log(other / rate) for other in larger]
        self._not = [math.log((1 - other) / (1 - rate)) for other in larger]
        self._logs = [0.0] * len(larger)
        self._limit = 1 / level
        self.observations = 0
        self.events = 0
        self.implausible = False
        """Whether the test has rejected the promise; never reset."""

    @property
    def evidence(self) -> float:
        """Evidence against the promise: 1 at the start; from 1 / level the promise is implausible."""
        largest = max(self._logs)
        total = sum(math.exp(value - largest) for value in self._logs)
        return math.exp(min(700.0, largest + math.log(total / len(self._logs))))

    def see(self, happened: bool) -> None:
        self.observations += 1
        self.events += happened
        steps = self._happened if happened else self._not
        self._logs = [value + step for value, step in zip(self._logs, steps, strict=True)]
        self.implausible = self.implausible or self.evidence >= self._limit


class Audit:
    """Compares final answers with the target's own, and warns when they differ more often than promised.

    A server cannot know whether an answer is right, only whether it differs from the target's. The calibration of the
    answer's sampling gives the allowed rate of differences. One audit runs at a time; an answer that ends meanwhile is
    not audited.

    Args:
        limit_s: timeout of an audit in seconds.

    Raises:
        ValueError: an invalid share, or no calibration.
    """

    def __init__(self, runner: Runner, metrics: Metrics, risk_settings: RiskSettings, limit_s: float) -> None:
        if not 0 < risk_settings.audit <= 1:
            raise ParseError(f"--audit is {risk_settings.audit}; give a share of the requests, such as 0.01")
        if not runner.calibrations:
            raise ParseError("--audit needs a calibration: give --calibration")
        self._runner = runner
        self._metrics = metrics
        self._risk_settings = risk_settings
        self._limit_s = limit_s
        self._tests = {
            _labels(calibration, risk): DriftTest(calibration.disagreement(risk), 1 - calibration.confidence)
            for calibration in runner.calibrations
            for risk, place in calibration.promises.items()
            if place is not None and calibration.disagreement(risk) < 1
        }
        self._task: asyncio.Task[None] | None = None

    def consider(self, choice: ChoiceState) -> None:
        """Audit a complete answer at random."""
        # The calibration's rate of differences includes unusual drafts, and no other fallback.
        counts = choice.answer.fallback in (None, "unusual_draft")
        risk = choice.job.settings.risk if counts else None
        if risk is None or (self._task is not None and not self._task.done()):
            return
        calibration = covering(self._runner.calibrations, choice.job.settings)
        if _labels(calibration, risk) in self._tests and random.random() < self._risk_settings.audit:
            self._task = asyncio.create_task(self._audit(choice, calibration, risk))

    async def _audit(self, choice: ChoiceState, calibration: Calibration, risk: float) -> None:
        job = replace(choice.job, alone=True, audit=True)
        text = ""
        try:
            async with asyncio.timeout(self._limit_s), aclosing(self._runner.stream(job)) as moments:
                async for moment in moments:
                    if isinstance(moment.event, Done):
                        text = moment.event.generation.text
        except Exception:
            log.exception("audit failed")
            return
        differs = not self._risk_settings.same(choice.answer.text, text)
        labels = _labels(calibration, risk)
        test = self._tests[labels]
        known = test.implausible
        test.see(differs)
        self._metrics.audited.labels(*labels, "differs" if differs else "same").inc()
        self._metrics.evidence.labels(*labels).set(test.evidence)
        self._metrics.implausible.labels(*labels).set(test.implausible)
        if test.implausible and not known:
            fields = {
                "risk": risk,
                "sampling": str(calibration.sampling),
                "audited": test.observations,
                "differing": test.events,
                "allowed": calibration.disagreement(risk),
                "confidence": calibration.confidence,
            }
            log.warning("promise implausible: calibrate again on current requests", extra={"fields": fields})


def _labels(calibration: Calibration, risk: float) -> tuple[str, str]:
    """Name a promise in the metrics."""
    return str(calibration.sampling), str(risk)
