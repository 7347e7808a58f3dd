"""The Weights & Biases run of a training: one run, even after interruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from parse_infer import tracking
from parse_infer.tracking import RunOptions
from parse_train.training_config import TrackedTrainingConfig


def options_of(config: TrackedTrainingConfig, models: Sequence[str | None]) -> RunOptions:
    """Return what identifies the training's run.

    Args:
        models: names of target and draft model; None for an unknown one.
    """
    known = tuple(model for model in models if model)
    return RunOptions(Path(str(config.output_dir)), "train", config.kind, known, config.project, config.run_name)


def start(config: TrackedTrainingConfig, models: Sequence[str | None], resumed: bool = False) -> None:
    """Start a run on the main process if the recipe reports to wandb.

    Without the package or the network, print the reason once and remove wandb from `config.report_to`.
    """
    if "wandb" not in _trackers(config):
        return
    if config.process_index != 0 and tracking.installed():
        return
    if reason := tracking.start(options_of(config, models), resumed):
        config.report_to = [name for name in _trackers(config) if name != "wandb"]
        if config.process_index == 0:
            print(f"{reason}: metrics are only printed to the log")


def log_artifact(
    config: TrackedTrainingConfig,
    models: Sequence[str | None],
    kind: Literal["dataset", "model"],
    what: str,
    source: str | Path,
    metadata: Mapping[str, Any] | None = None,
    used: bool = False,
) -> None:
    """Log a data set or a model under a name that begins with the pair, as `config.artifacts` says.

    Args:
        what: the rest of the name.
        used: the training reads it.
    """
    name = f"{options_of(config, models).pair}-{what}"
    tracking.log_artifact(config.artifacts, kind, name, source, metadata, used)


def _trackers(config: TrackedTrainingConfig) -> list[str]:
    return config.report_to if isinstance(config.report_to, list) else []
