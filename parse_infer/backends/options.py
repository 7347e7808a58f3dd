"""`BackendOptions`: the keyword options that every backend has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parse_infer.text.cuts import CutPolicy


@dataclass(frozen=True)
class BackendOptions:
    """Judge and chat templates of a backend."""

    judge: str | None = None
    """A judge without training, instead of an adapter: "min_p", "min_p:ratio=0.3" (keep draft tokens at least 0.3
    times as likely as the target's first choice), "zero_shot" (ask the target), or another rule of
    `parse_infer.judge.registry`. With an adapter, a rule is a floor: a kept token needs both. Without adapter and
    judge, answers are lossless speculation."""
    cut_policy: CutPolicy | None = None
    """Where to cut drafts; None takes the judge's training policy."""
    calibration: str | Path | None = None
    """File written by `parse-infer calibrate`; None reads the file in the adapter's folder, if any."""
    template_options: Mapping[str, Any] | None = None
    """Options of the chat templates, such as {"enable_thinking": False}."""
    thinking_marks: str | None = None
    """The tokens around the target's thinking, separated by a space. None: "<think> </think>", if the target has these
    tokens. "none": the target does not think."""
