"""`Parts`: what a `ServerBackend` is made of, and which settings it can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parse_infer.backends.launch.supervisor import Supervisor
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.target import Target
from parse_infer.calibration.schema import Calibration
from parse_infer.errors import SettingsError
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.tokenizer_spec import TokenizerSpec


@dataclass(frozen=True)
class Parts:
    """The parts of a `ServerBackend`.

    Attributes:
        target: the target's servers and judge.
        draft: the draft model's replicas or in-process model, with its tokenizer (None: its servers get text); None:
            drafts are given with the prompts.
        models: names of the models; see `ServerBackend.describe`.
        train_problems: hashes of the training prompts of judge and models, see `leave_out_learnt`.
        calibrations: sources of the risk promises, one for each sampling.
        threshold: the judge's calibrated threshold, if it has one.
        processes: servers started for the backend; `ServerBackend.close` ends them.
    """

    target: Target
    draft: tuple[ReplicaPool | InProcessDraft, TokenizerSpec | None] | None
    models: dict[str, Any]
    train_problems: frozenset[str] = frozenset()
    calibrations: tuple[Calibration, ...] = ()
    threshold: float | None = None
    processes: Supervisor | None = None


def check_servable(settings: GenerationSettings, calibrations: Sequence[Calibration], exact: bool) -> None:
    """Raise ValueError for settings that servers cannot serve.

    Args:
        exact: the target's choices are read.
    """
    if settings.mode == "exact" and not exact:
        raise SettingsError(
            "mode 'exact' over servers reads the target's choices, as adapters on log-probabilities and min_p do: "
            "give one of these"
        )
    if settings.risk is not None and not calibrations:
        raise SettingsError(
            f"risk is {settings.risk}, but no calibration for --backend vllm was given: run `parse-infer calibrate "
            "--backend vllm` and pass its calibration.json"
        )
