"""Metrics of all workers of a server, and a port of their own.

Workers share files: prometheus_client's multiprocess mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from parse_infer.errors import ParseError

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads the variable when it is imported


def of_all_workers() -> CollectorRegistry | None:
    """Registry of the metrics of all workers; None: this process is no worker and has none."""
    if FOLDER not in os.environ:
        return None
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry


@contextmanager
def shared_metrics() -> Iterator[CollectorRegistry]:
    """Let all processes that are started within the block share their metrics; yield the registry of all of them."""
    with TemporaryDirectory(prefix="parse-metrics-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = folder
        try:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            yield registry
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before


def forget_worker(pid: int) -> None:
    """Leave a worker that has ended out of the gauges; its counts stay."""
    mark_process_dead(pid)


@contextmanager
def open_metrics_port(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve metrics in a thread; yield the port. Raises ParseError if the port cannot be used."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        reason = error.strerror or error
        raise ParseError(f"cannot serve metrics on {host}, port {port} ({reason}): change --metrics-port") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
