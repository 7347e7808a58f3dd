"""Times things against each other, in turn, so that a machine that slows down slows all of them down."""

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
    """Something that is timed: `run`, after an untimed `prepare`."""

    name: str
    prepare: Callable[[], Any]
    run: Callable[[], Any]


def measure(todo: Sequence[Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each step, by name and round; the third of three in a row counts, since in use many follow."""
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
