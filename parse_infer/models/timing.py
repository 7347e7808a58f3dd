"""Interleaved timing of several steps, so that a slowdown of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from parse_infer.models.devices import wait_for


@dataclass(frozen=True)
class Step:
    """A timed `run` after an untimed `prepare`."""

    name: str
    prepare: Callable[[], Any]
    run: Callable[[], Any]


def measure(todo: Sequence[Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each step by name and round. Only the last of three consecutive runs counts (warm)."""
    seconds: dict[str, list[float]] = {step.name: [] for step in todo}
    for _ in track(range(rounds), "timing", transient=True):
        for step in todo:
            for counts in (False, False, True):
                step.prepare()
                wait_for(device)
                begin = time.perf_counter()
                step.run()
                wait_for(device)
                if counts:
                    seconds[step.name].append(time.perf_counter() - begin)
    return seconds
