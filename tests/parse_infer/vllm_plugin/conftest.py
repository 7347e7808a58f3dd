"""One engine at a time in the test's own process: small, eager unless asked, and quick to start."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

# Before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = find_spec("vllm")
    if found is None or found.origin is None:  # this folder has the name too, but is no package
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@contextmanager
def running(**options: Any) -> Iterator[Any]:
    """A `vllm.LLM`, gone at the end together with what it left in the process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {"max_num_seqs": 16, "disable_log_stats": True, "enforce_eager": True, **options}
    llm = None
    try:
        llm = LLM(**options)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture
def run() -> Callable[..., Any]:
    return running
