"""Settings that training reads from a folder written by `parse-data build`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data_tools.labels.shards import FORMAT
from parse_infer.errors import ParseError
from parse_infer.files import read_json
from parse_infer.models.fingerprint import fingerprint, same_weights


@dataclass(frozen=True)
class BuildInfo:
    """The settings of a build that training uses; empty for other data."""

    cut_policy: dict[str, Any] = field(default_factory=dict)
    template_options: dict[str, Any] = field(default_factory=dict)
    label: dict[str, Any] = field(default_factory=dict)
    """Label definition: rollouts, their temperature, margin and error of the sequential test, and what is labelled."""
    target: dict[str, Any] = field(default_factory=dict)
    """`describe_target` of the model whose rollouts gave the labels."""
    draft: dict[str, Any] = field(default_factory=dict)
    """`describe_target` of the model that wrote the drafts, with the name in the recipe."""
    task: str = ""
    task_options: dict[str, Any] = field(default_factory=dict)
    max_draft_tokens: int = 256

    def has_target_of(self, other: BuildInfo) -> bool:
        """Whether the labels of both builds come from the same target; builds over servers do not know its weights."""
        one, two = ({**build.target, "fingerprint": None} for build in (self, other))
        weights = [build.target.get("fingerprint") for build in (self, other)]
        return one == two and (None in weights or same_weights(*map(str, weights)))

    def check_target(self, model: PreTrainedModel, data: str) -> None:
        """Raise ValueError if the labels come from rollouts of other weights than `model`."""
        known = self.target.get("fingerprint")
        if known and not same_weights(known, fingerprint(model)):
            raise ParseError(
                f"{data} was labelled by rollouts of {self.target.get('name')!r}, which is not the target "
                f"{model.config._name_or_path!r}: set target to that model, or build data for this target"
            )


def read_build_info(source: str) -> BuildInfo:
    """Read the build.json in the folder `source`; return an empty `BuildInfo` without that file.

    Raises:
        ValueError: build.json is damaged, or of another version.
    """
    path = Path(source) / "build.json"
    if not path.is_file():
        return BuildInfo()
    content = read_json(path, "build the data again")
    if (version := content.get("format", FORMAT)) != FORMAT:
        raise ParseError(f"{path} has format {version}, but this version of parse-engine reads {FORMAT}: build again")
    config, models = content.get("config"), content.get("models", {})
    if not isinstance(config, dict) or not isinstance(models, dict):
        raise ParseError(f"{path} is damaged: config or models is missing; build the data again")
    of_rollouts = ("rollouts", "max_rollouts", "rollout_temperature", "margin", "max_label_error")
    label = {key: config[key] for key in (*of_rollouts, "check_with", "prefix_labels") if key in config}
    return BuildInfo(
        config.get("cut_policy") or {},
        config.get("template_options") or {},
        label,
        {
            **(models.get("target") or {}),
            **({"name": config["target"]} if models.get("target") and config.get("target") else {}),
        },
        {**(models.get("draft") or {}), "name": config.get("draft")},
        config.get("task") or "",
        config.get("task_options") or {},
        config.get("max_draft_tokens") or BuildInfo.max_draft_tokens,
    )
