"""Metrics of the models' servers, by role and address."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from parse_infer.backends.pool.observer import PoolObserver

if TYPE_CHECKING:
    from parse_infer.backends.pool.replicas import ReplicaPool  # needs an optional extra

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SERVER = ["role", "server"]


class UpstreamMetrics:
    """Observes all pools.

    Args:
        pools: by role.
    """

    def __init__(self, registry: CollectorRegistry, pools: Mapping[str, ReplicaPool]) -> None:
        self.requests = Counter(
            "parse_upstream_requests", "Requests to the models' servers.", [*_SERVER, "outcome"], registry=registry
        )
        self.request_s = Histogram(
            "parse_upstream_request_seconds",
            "Duration of requests to the models' servers, without cancelled ones.",
            _SERVER,
            buckets=_SECONDS,
            registry=registry,
        )
        self.retries = Counter(
            "parse_upstream_retries", "Requests that had failed before.", _SERVER, registry=registry
        )
        self.ejections = Counter(
            "parse_upstream_ejections",
            "How often a server stopped getting requests.",
            [*_SERVER, "reason"],
            registry=registry,
        )
        self.ejected = Gauge(
            "parse_upstream_ejected",
            "Workers that send the server no requests.",
            _SERVER,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._pools = pools
        self._known: set[tuple[str, str]] = set()
        for role, pool in pools.items():
            pool.observer = _Observer(self, role)

    def refresh(self) -> None:
        """Read which servers get no requests. A server that has gone keeps its counts."""
        ejected = {
            (role, _without_credentials(server.url)): not server.healthy or server.circuit.is_open
            for role, pool in self._pools.items()
            for server in pool.members
        }
        self._known |= ejected.keys()
        for labels in self._known:
            self.ejected.labels(*labels).set(ejected.get(labels, False))


class _Observer(PoolObserver):
    def __init__(self, metrics: UpstreamMetrics, role: str) -> None:
        self._metrics = metrics
        self._server = cache(lambda url: (role, _without_credentials(url)))

    def ended(self, url: str, outcome: str, seconds: float) -> None:
        server = self._server(url)
        self._metrics.requests.labels(*server, outcome).inc()
        if outcome != "cancelled":
            self._metrics.request_s.labels(*server).observe(seconds)

    def retried(self, url: str) -> None:
        self._metrics.retries.labels(*self._server(url)).inc()

    def ejected(self, url: str, reason: str) -> None:
        self._metrics.ejections.labels(*self._server(url), reason).inc()


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
