"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from parse_infer.request.events import Done, Drafted, Verified
from parse_infer.request.output import Generation
from parse_infer.serve.api_keys import caller
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.runner import InvalidRequest, Moment
from parse_infer.serve.upstream_metrics import UpstreamMetrics
from parse_infer.serve.worker_metrics import of_all_workers

if TYPE_CHECKING:
    from parse_infer.backends.pool.replicas import ReplicaPool  # needs an optional extra

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATIOS = tuple(i / 20 for i in range(1, 21))


class Metrics:
    """Metrics of one process, in its own registry.

    Gauges of several workers are combined as their `multiprocess_mode` says.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._watched: list[tuple[Gauge, Callable[[], float]]] = []
        self._upstream: UpstreamMetrics | None = None
        ProcessCollector(registry=registry)
        self.requests = Counter("parse_requests", "HTTP requests.", ["path", "status"], registry=registry)
        self.request_s = Histogram(
            "parse_request_seconds", "Duration of HTTP requests.", ["path"], buckets=_LONG, registry=registry
        )
        self.answers = Counter("parse_answers", "Complete answers.", ["finish_reason"], registry=registry)
        self.broken = Counter("parse_answers_broken", "Cancelled or failed answers.", registry=registry)
        self.relayed = Counter(
            "parse_answers_relayed", "Answers of the target's own server, passed through.", registry=registry
        )
        self.client_answers = Counter(
            "parse_client_answers",
            "Answers, also passed-through ones, by name of the API key.",
            ["client"],
            registry=registry,
        )
        self.prompt_tokens = Counter("parse_prompt_tokens", "Prompt tokens.", registry=registry)
        self.tokens = Counter("parse_tokens", "Answer tokens, by author.", ["author"], registry=registry)
        self.draft_tokens = Counter("parse_draft_tokens", "Draft tokens, by fate.", ["fate"], registry=registry)
        self.decisions = Counter(
            "parse_decisions",
            "Adaptive answers, with a draft or by the target alone.",
            ["decision"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "parse_fallbacks", "Answers by the target without the requested draft.", ["reason"], registry=registry
        )
        self.kept = Histogram(
            "parse_acceptance_ratio", "Accepted share of drafts.", buckets=_RATIOS, registry=registry
        )
        self.validity = Histogram("parse_validity_ratio", "Validity at the cuts.", buckets=_RATIOS, registry=registry)
        self.forwards = Counter("parse_forwards", "Forwards of the models.", ["model"], registry=registry)
        self.pass_s = Histogram(
            "parse_verification_pass_seconds", "Duration of verification passes.", buckets=_SHORT, registry=registry
        )
        self.loop_lag_s = Histogram(
            "parse_loop_lag_seconds", "Delay of timers of the event loop.", buckets=_SHORT, registry=registry
        )
        self.waiting_s = Histogram("parse_waiting_seconds", "Time in the queue.", buckets=_LONG, registry=registry)
        self.first_text_s = Histogram(
            "parse_time_to_first_token_seconds", "Time from request to first text.", buckets=_LONG, registry=registry
        )
        self.between_s = Histogram(
            "parse_inter_token_seconds", "Time between two pieces of text.", buckets=_SHORT, registry=registry
        )
        self.audited = Counter(
            "parse_audited",
            "Answers compared with the target's own.",
            ["sampling", "risk", "result"],
            registry=registry,
        )
        self.evidence = Gauge(
            "parse_promise_evidence",
            "Evidence against the promise; 1 at the start.",
            ["sampling", "risk"],
            registry=registry,
            multiprocess_mode="max",
        )
        self.implausible = Gauge(
            "parse_promise_implausible",
            "1: answers differ more often than promised.",
            ["sampling", "risk"],
            registry=registry,
            multiprocess_mode="max",
        )
        self.answer_s = Histogram("parse_answer_seconds", "Time to write an answer.", buckets=_LONG, registry=registry)

    def watch(
        self,
        name: str,
        text: str,
        value: Callable[[], float],
        multiprocess_mode: Literal["livesum", "livemin", "livemax"] = "livesum",
    ) -> None:
        """Register a gauge whose value `refresh` reads."""
        gauge = Gauge(name, text, registry=self.registry, multiprocess_mode=multiprocess_mode)
        self._watched.append((gauge, value))

    def watch_pools(self, pools: Mapping[str, ReplicaPool]) -> None:
        """Register the metrics of the models' servers."""
        self._upstream = UpstreamMetrics(self.registry, pools)

    def refresh(self) -> None:
        """Read the watched values. A scrape may come in another thread or process, so a timer calls this too."""
        for gauge, value in self._watched:
            gauge.set(value())
        if self._upstream is not None:
            self._upstream.refresh()

    def tick(self, lag_s: float) -> None:
        """Note the delay of a timer, and refresh."""
        self.loop_lag_s.observe(lag_s)
        self.refresh()

    def count_client(self, answers: int = 1) -> None:
        """Count answers of the current request's client, if its key has a name."""
        if name := caller.get().name:
            self.client_answers.labels(name).inc(answers)

    def meter(self, choice: ChoiceState) -> Meter:
        return Meter(self, choice)

    def text(self) -> bytes:
        self.refresh()
        return generate_latest(of_all_workers() or self.registry)


class Meter:
    """Counts one answer, which is complete or broken at the end of a `with` block, unless it was refused."""

    def __init__(self, metrics: Metrics, choice: ChoiceState) -> None:
        self._metrics = metrics
        self._choice = choice
        self._drafted_at: float | None = None
        self._text_at: float | None = None
        self._complete = False

    def see(self, moment: Moment, text: str) -> None:
        event, metrics = moment.event, self._metrics
        if isinstance(event, Drafted):
            self._drafted_at = moment.at if event.n_tokens else None
        elif isinstance(event, Verified):
            if self._drafted_at is not None:
                metrics.pass_s.observe(moment.at - self._drafted_at)
            for segment in event.segments:
                if segment.validity is not None:
                    metrics.validity.observe(segment.validity)
        elif isinstance(event, Done):
            self._complete = True
            self._count(event.generation)
        if text:
            if self._text_at is None:
                metrics.first_text_s.observe(moment.at - self._choice.asked_at)
            else:
                metrics.between_s.observe(moment.at - self._text_at)
            self._text_at = moment.at

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._complete and kind is not InvalidRequest:
            self._metrics.broken.inc()

    def _count(self, answer: Generation) -> None:
        metrics, stats = self._metrics, answer.stats
        metrics.answers.labels(self._choice.finish_reason).inc()
        metrics.count_client()
        metrics.answer_s.observe(answer.timings.total_s)
        metrics.waiting_s.observe(max(0.0, self._choice.started_at - self._choice.asked_at))
        if self._choice.job.settings.adaptive:
            metrics.decisions.labels("draft" if self._choice.drafted else "alone").inc()
        if answer.fallback is not None:
            metrics.fallbacks.labels(answer.fallback).inc()
        for span in answer.spans:
            metrics.tokens.labels(span.source).inc(span.n_tokens)
        metrics.draft_tokens.labels("accepted").inc(stats.accepted_tokens)
        metrics.draft_tokens.labels("rejected").inc(stats.draft_tokens - stats.accepted_tokens)
        if stats.draft_tokens:
            metrics.kept.observe(stats.acceptance_rate)
        metrics.forwards.labels("target").inc(stats.target_forwards)
        metrics.forwards.labels("draft").inc(stats.draft_forwards)
