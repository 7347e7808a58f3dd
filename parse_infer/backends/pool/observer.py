"""`PoolObserver`: takes what the replicas of a model report, for metrics."""

from __future__ import annotations


class PoolObserver:
    """Ignores all reports. Servers are named by their addresses."""

    def ended(self, url: str, outcome: str, seconds: float) -> None:
        """An attempt of a request has ended.

        Args:
            outcome: "ok", "rejected" (as invalid), "refused" (other statuses from 300 to 499), "rate_limited",
                "timed_out", "failed" or "cancelled".
        """

    def retried(self, url: str) -> None:
        """A request that failed before is sent to this server."""

    def ejected(self, url: str, reason: str) -> None:
        """The server gets no requests from now on: it is "unhealthy", or its requests are "failing"."""
