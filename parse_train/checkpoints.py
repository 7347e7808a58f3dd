"""Which checkpoint a training continues from: the last complete one, and only of the same recipe.

A checkpoint carries its recipe in `trainer_state.json`, the file that transformers' Trainer writes last.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parse_infer.files import read_json
from parse_train.training_config import TrainingConfig

STATE = "trainer_state.json"
# Fields (and, ending in "_", beginnings of their names) that may change from run to run. Whatever else differs makes
# another training.
RESUME_SAFE_FIELDS = (
    # where things go, and what is shown
    *(
        "output_dir",
        "adapter_dir",
        "answers",
        "run_name",
        "project",
        "artifacts",
        "report_to",
        "trackio_",
        "log_",
        "logging_",
    ),
    *("disable_tqdm", "debug", "skip_memory_metrics", "push_to_hub", "push_to_hub_", "hub_"),
    # when the training is looked at, and what is made of its result
    *("save_", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "do_"),
    *("per_device_eval_batch_size", "n_eval_problems", "baselines", "draft", "risk_", "calibration_", "cut_policy"),
    *("head_dtype", "adapter_dtype"),
    # what it runs on
    *("use_cpu", "local_rank", "ddp_", "torch_compile", "torch_compile_", "batch_size", "resume_from_checkpoint"),
    *("enable_jit_", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    "dataloader_prefetch_factor",
)


@dataclass(frozen=True)
class Start:
    """Where a training begins: at a checkpoint, or from nothing. One that is `finished` is not trained on."""

    recipe: dict[str, Any]
    checkpoint: Path | None = None
    finished: bool = False


def prepare(config: TrainingConfig, rows: int | None = None) -> Start:
    """Decide where the training begins, and clear what is in its way. Every process must call it.

    Args:
        rows: how many rows are learnt from, if that is known.

    Raises:
        ValueError: the checkpoints in `output_dir` come from a different recipe, or the named one is incomplete.
        FileNotFoundError: the named one does not exist.
    """
    start = _find(config, _recipe(config, rows))
    with config.main_process_first(local=False):  # the others wait until old checkpoints are gone
        if config.process_index == 0:
            for folder in checkpoints(str(config.output_dir)):
                if config.resume_from_checkpoint == "restart" or incomplete(folder):
                    shutil.rmtree(folder)
            if start.finished:
                print(f"{start.checkpoint} is the end of the training: it goes on to evaluation and export")
            else:
                print(f"resuming from {start.checkpoint}" if start.checkpoint else f"training on {config.device}")
    return start


def train(trainer: Trainer, start: Start) -> None:
    """Train to the end. A finished training gets its weights back and is ready to be evaluated and exported."""
    if start.checkpoint is not None and start.finished:  # the Trainer would take one step more before it looks
        trainer.state = TrainerState.load_from_json(str(start.checkpoint / STATE))
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        weights = _weights(Path(best or start.checkpoint))
        if isinstance(trainer.model, PeftModel):
            set_peft_model_state_dict(trainer.model, load_file(weights))
        else:
            load_model(trainer.model, weights)  # type: ignore[arg-type]
        trainer.is_deepspeed_enabled = False  # it evaluates only what it trains
        return
    trainer.add_callback(RecipeNote(start.recipe))
    trainer.train(resume_from_checkpoint=None if start.checkpoint is None else str(start.checkpoint))


class RecipeNote(TrainerCallback, ExportableState):
    """Puts the recipe into the `trainer_state.json` of every checkpoint."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe

    def state(self) -> dict[str, Any]:
        return {"args": {"recipe": self.recipe}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.stateful_callbacks[type(self).__name__] = self.state()  # that of a named checkpoint may differ


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders in `output_dir`, complete or not, in the order of their steps."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    return sorted((f for f in found if f.name.split("-")[-1].isdigit()), key=lambda f: int(f.name.split("-")[-1]))


def incomplete(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed (a half-written file), or None."""
    try:
        _state(folder)
    except (OSError, ValueError):
        return f"{STATE} is missing or cut off"
    try:
        with safe_open(_weights(folder), framework="pt") as tensors:
            tensors.keys()
    except (OSError, SafetensorError):
        return "model.safetensors is missing or cut off"
    if not ((folder / "optimizer.pt").is_file() or (folder / "latest").is_file()):  # `latest`: DeepSpeed's
        return "the optimiser's state is missing"
    return None


def _weights(folder: Path) -> Path:
    """The file of a checkpoint's weights: all of them, or those of a LoRA."""
    return next(
        (path for path in [folder / "adapter_model.safetensors"] if path.is_file()), folder / "model.safetensors"
    )


def _find(config: TrainingConfig, recipe: dict[str, Any]) -> Start:
    wanted = config.resume_from_checkpoint
    if wanted == "restart":
        return Start(recipe)
    if wanted not in (None, "auto"):
        named = Path(wanted)
        if not named.is_dir():
            raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {wanted}")
        if reason := incomplete(named):
            raise ValueError(f"the checkpoint {wanted} cannot be resumed: {reason}; name an earlier one")
        return Start(recipe, named, _finished(named) and _difference(named, recipe) is None)
    complete = [folder for folder in checkpoints(str(config.output_dir)) if incomplete(folder) is None]
    if not complete:
        return Start(recipe)
    if difference := _difference(complete[-1], recipe):
        raise ValueError(
            f"{config.output_dir} holds checkpoints of {difference}: choose another output_dir, or "
            "--resume_from_checkpoint restart to delete them"
        )
    return Start(recipe, complete[-1], _finished(complete[-1]))


def _recipe(config: TrainingConfig, rows: int | None) -> dict[str, Any]:
    """All that decides about the result, as JSON gives it back."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if not _harmless(f.name)}
    deepspeed = getattr(config, "deepspeed_plugin", None) is not None  # its checkpoints are of another kind
    values |= {"rows": rows, "world_size": config.world_size, "under_deepspeed": deepspeed}
    return json.loads(json.dumps(values, default=str))


def _harmless(name: str) -> bool:
    return name in RESUME_SAFE_FIELDS or name.startswith(
        tuple(each for each in RESUME_SAFE_FIELDS if each.endswith("_"))
    )


def _difference(folder: Path, recipe: dict[str, Any]) -> str | None:
    """What training a checkpoint belongs to, unless to this one."""
    note = _state(folder).get("stateful_callbacks", {}).get(RecipeNote.__name__)
    if note is None:
        return "an unknown training"
    before = note["args"]["recipe"]
    for name, value in recipe.items():
        if name in before and before[name] != value:
            return f"a training with {name} {before[name]!r}, now it is {value!r}"
    return None


def _finished(folder: Path) -> bool:
    state = _state(folder)
    return state["global_step"] >= state["max_steps"]


def _state(folder: Path) -> dict[str, Any]:
    return read_json(folder / STATE, "name an earlier checkpoint")
