"""Metrics of all workers of a server, and a port of their own.

Workers share files: prometheus_client's multiprocess mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from parse_infer.errors import ParseError

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads the variable when it is imported


def of_all_workers(folder: str | None = None) -> CollectorRegistry | None:
    """Registry of the metrics of all workers.

    Args:
        folder: of their files; None: the one that this process shares, if it does.
    """
    folder = folder or os.environ.get(FOLDER)
    if folder is None:
        return None
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)
    return registry


@contextmanager
def metrics_port(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve metrics in a thread; yield the port. Raises ParseError if the port is in use."""
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
