"""Which checkpoint a training continues from: the last complete one, and only of the same recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parse_train.validity.config import ValidityTrainingConfig

RECIPE_FILE = "recipe.json"
# A different value of any of these makes a different training.
DECISIVE = (
    *("target", "target_dtype", "data", "eval_data", "eval_share", "max_length", "step_separator", "template_options"),
    *("probe_text", "verbalizer_yes", "verbalizer_no", "lora_rank", "lora_alpha", "lora_dropout", "token_rank"),
    *("lora_target_modules", "soft_labels", "class_weighting", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    *("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "bf16", "train_sampling_strategy", "seed"),
    *("data_seed", "world_size"),
)


def checkpoint_to_resume(config: ValidityTrainingConfig, train_drafts: int) -> str | None:
    """The folder to resume from, or None to start anew. Reads only; every process may call it.

    Raises:
        ValueError: the checkpoints in `output_dir` come from a different recipe, or the named one is incomplete.
        FileNotFoundError: the named one does not exist.
    """
    wanted = config.resume_from_checkpoint
    if wanted == "restart":
        return None
    if wanted not in (None, "auto"):
        if not Path(wanted).is_dir():
            raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {wanted}")
        reason = incomplete(Path(wanted))
        if reason:
            raise ValueError(f"the checkpoint {wanted} cannot be resumed: {reason}; name an earlier one")
        return wanted
    complete = [folder for folder in checkpoints(str(config.output_dir)) if incomplete(folder) is None]
    if not complete:
        return None
    _check_same_recipe(config, train_drafts)
    return str(complete[-1])


def begin(config: ValidityTrainingConfig, train_drafts: int) -> None:
    """Note the recipe in `output_dir`, so that a later run can tell whether it is the same. Main process only.

    With `resume_from_checkpoint: restart`, deletes the checkpoints there first.
    """
    if config.resume_from_checkpoint == "restart":
        for folder in checkpoints(str(config.output_dir)):
            shutil.rmtree(folder)
    output = Path(str(config.output_dir))
    output.mkdir(parents=True, exist_ok=True)
    (output / RECIPE_FILE).write_text(json.dumps(_decisive(config, train_drafts), indent=2) + "\n")


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders in `output_dir`, complete or not, in the order of their steps."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    return sorted((f for f in found if f.name.split("-")[-1].isdigit()), key=lambda f: int(f.name.split("-")[-1]))


def incomplete(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed (a half-written file), or None. The Trainer writes its state last."""
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or cut off"
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            tensors.keys()
    except (OSError, SafetensorError):
        return "model.safetensors is missing or cut off"
    if not ((folder / "optimizer.pt").is_file() or (folder / "latest").is_file()):  # `latest`: DeepSpeed's
        return "the optimiser's state is missing"
    return None


def _decisive(config: ValidityTrainingConfig, train_drafts: int) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in DECISIVE} | {"train_drafts": train_drafts}
    return json.loads(json.dumps(values, default=str))


def _check_same_recipe(config: ValidityTrainingConfig, train_drafts: int) -> None:
    file = Path(str(config.output_dir), RECIPE_FILE)
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    for name, value in _decisive(config, train_drafts).items():
        if name in before and before[name] != value:
            raise ValueError(
                f"{config.output_dir} holds checkpoints of a training with {name} {before[name]!r}, now it is "
                f"{value!r}: choose another output_dir, or --resume_from_checkpoint restart to delete them"
            )
