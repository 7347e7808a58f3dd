"""Environment and command line of a measurement, recorded with every result."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from parse_infer.models.devices import device_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe processor, cores, threads, GPU and library versions."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def describe_run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Describe date and command line of the running program."""
    command = list(sys.argv if argv is None else argv)
    program = Path(command[0])
    command[0] = "parse-infer" if program.name == "__main__.py" else program.name  # python -m parse_infer
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }


def free_memory() -> int | None:
    """Return the bytes available to new programs, including caches; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
