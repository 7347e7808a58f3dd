"""What a benchmark ran on: part of its results, and of what must not change between two halves of a run."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from parse_infer.engine import ParseEngine
from parse_infer.models.devices import device_name
from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import LanguageModel
from parse_infer.models.packed_linear import n_parameters


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads, the device where it is a GPU, and library versions."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def describe_models(engine: ParseEngine) -> dict[str, Any]:
    """Device, number type and the loaded parts, each with a fingerprint that tells a retrained one apart."""
    target = engine.target.model
    return {
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": _describe(engine.target),
        "draft": _describe(engine.draft) if engine.draft is not None else None,
        "adapter": _adapter_fingerprint(engine),
    }


def describe_run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """When and how the benchmark was started."""
    command = list(sys.argv if argv is None else argv)
    program = Path(command[0])
    command[0] = "parse-infer" if program.name == "__main__.py" else program.name  # python -m parse_infer
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }


def _describe(model: LanguageModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": n_parameters(model.model),
        "weights": hashlib.sha256(fingerprint(model.model).encode()).hexdigest()[:12],
    }


def _adapter_fingerprint(engine: ParseEngine) -> str | None:
    if engine.judge is None:
        return None
    weights = [p.detach().float().cpu().numpy().tobytes() for p in engine.judge.head.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:12]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
