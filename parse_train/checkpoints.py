"""Resume a training from its last complete checkpoint, if that checkpoint has the same recipe.

A checkpoint records its recipe in `trainer_state.json`, the file that transformers' Trainer writes last.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parse_infer.errors import ParseError
from parse_infer.files import read_json
from parse_train.training_config import TrainingConfig

STATE = "trainer_state.json"
# Fields, and prefixes of fields ending in "_", that may change when a training resumes. A change of any other field
# starts a different training.
RESUME_SAFE_FIELDS = (
    # paths and logging
    *("output_dir", "adapter_dir", "answers", "run_name", "project", "artifacts", "report_to"),
    *("trackio_", "log_", "logging_", "disable_tqdm", "debug", "skip_memory_metrics"),
    *("push_to_hub", "push_to_hub_", "hub_"),
    # evaluation and export
    *("save_", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "do_"),
    *("per_device_eval_batch_size", "n_eval_problems", "risk_", "calibration_", "cut_policy"),
    *("head_dtype", "adapter_dtype"),
    # devices and processes
    *("use_cpu", "local_rank", "ddp_", "torch_compile", "torch_compile_", "batch_size", "resume_from_checkpoint"),
    *("activation_checkpointing", "gradient_checkpointing"),
    *("enable_jit_", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    "dataloader_prefetch_factor",
)


@dataclass(frozen=True)
class Start:
    """Start of a training: a checkpoint, or None. Training is skipped for a `finished` checkpoint."""

    recipe: dict[str, Any]
    checkpoint: Path | None = None
    finished: bool = False


def data_digest(examples: Iterable[Any]) -> str:
    """Identify training examples, which are dataclasses, by their content."""
    digest = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            digest.update(value.numpy(force=True).tobytes())
        elif is_dataclass(value):
            for name in fields(value):
                add(getattr(value, name.name))
        else:
            digest.update(repr(value).encode())

    for example in examples:
        add(example)
    return digest.hexdigest()[:16]


def prepare(config: TrainingConfig, rows: int | None = None, data: str | None = None) -> Start:
    """Choose the start of the training, and delete unusable checkpoints. Every process must call this function.

    Args:
        rows: number of training rows, if known.
        data: `data_digest` of the training examples, if known.

    Raises:
        ValueError: the checkpoints in `output_dir` have a different recipe, or the named checkpoint is incomplete.
        FileNotFoundError: the named checkpoint does not exist.
    """
    start = _find(config, _recipe(config, rows, data))
    with config.main_process_first(local=False):  # others wait until old checkpoints are deleted
        if config.process_index == 0:
            for folder in checkpoints(str(config.output_dir)):
                if config.resume_from_checkpoint == "restart" or incomplete(folder):
                    shutil.rmtree(folder)
            if start.finished:
                print(f"{start.checkpoint} is the end of the training: continuing with evaluation and export")
            else:
                print(f"resuming from {start.checkpoint}" if start.checkpoint else f"training on {config.device}")
    return start


def train(trainer: Trainer, start: Start) -> None:
    """Train to the end, or load the weights of a finished training for evaluation and export."""
    if start.checkpoint is not None and start.finished:  # the Trainer would take one more step
        trainer.state = TrainerState.load_from_json(str(start.checkpoint / STATE))
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        weights = _weights(Path(best or start.checkpoint))
        if isinstance(trainer.model, PeftModel):
            set_peft_model_state_dict(trainer.model, load_file(weights))
        else:
            load_model(trainer.model, weights)  # type: ignore[arg-type]
        trainer.is_deepspeed_enabled = False  # DeepSpeed evaluates only after training
        return
    trainer.add_callback(RecipeNote(start.recipe))
    trainer.add_callback(StopAtNaN())
    # The gradient of cuDNN's masked attention can be NaN (torch 2.11, H200, bfloat16); other kernels give numbers.
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer.train(resume_from_checkpoint=None if start.checkpoint is None else str(start.checkpoint))


class RecipeNote(TrainerCallback, ExportableState):
    """Records the recipe in the `trainer_state.json` of every checkpoint."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe

    def state(self) -> dict[str, Any]:
        return {"args": {"recipe": self.recipe}, "attributes": {}}

    def on_train_begin(self, args: TrainingArguments, state: Any, control: TrainerControl, **_: object) -> None:
        state.stateful_callbacks[type(self).__name__] = self.state()  # a named checkpoint may have another recipe


class StopAtNaN(TrainerCallback):
    """Ends a training whose gradient is NaN: all weights are NaN after the step."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        if math.isnan(float((logs or {}).get("grad_norm", 0))):
            raise self._error("gradient is", state)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        assert model is not None
        trained = (weights for weights in model.parameters() if weights.requires_grad)
        if any(weights.isnan().any() for weights in trained):  # the last steps are not logged
            raise self._error("weights are", state)

    def _error(self, what: str, state: TrainerState) -> ParseError:
        return ParseError(
            f"the {what} NaN at step {state.global_step}, so the training has ended: try a lower learning_rate, or "
            "float32 instead of bf16; earlier checkpoints may be NaN too"
        )


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return all checkpoint folders in `output_dir`, complete or not, in the order of their steps."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    return sorted((f for f in found if f.name.split("-")[-1].isdigit()), key=lambda f: int(f.name.split("-")[-1]))


def incomplete(folder: Path) -> str | None:
    """Return why a checkpoint cannot be resumed, or None."""
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
    """Return the weight file of a checkpoint: the LoRA's file if present, else the model's."""
    lora = folder / "adapter_model.safetensors"
    return lora if lora.is_file() else folder / "model.safetensors"


def _find(config: TrainingConfig, recipe: dict[str, Any]) -> Start:
    requested = config.resume_from_checkpoint
    if requested == "restart":
        return Start(recipe)
    if requested not in (None, "auto"):
        named = Path(requested)
        if not named.is_dir():
            raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {requested}")
        if reason := incomplete(named):
            raise ParseError(f"the checkpoint {requested} cannot be resumed: {reason}; name an earlier checkpoint")
        return Start(recipe, named, _finished(named) and _difference(named, recipe) is None)
    complete = [folder for folder in checkpoints(str(config.output_dir)) if incomplete(folder) is None]
    if not complete:
        return Start(recipe)
    if difference := _difference(complete[-1], recipe):
        raise ParseError(
            f"{config.output_dir} holds checkpoints of {difference}: choose another output_dir, or "
            "--resume_from_checkpoint restart to delete them"
        )
    return Start(recipe, complete[-1], _finished(complete[-1]))


def _recipe(config: TrainingConfig, rows: int | None, data: str | None) -> dict[str, Any]:
    """Return all settings that affect the result, after a JSON round trip."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if not _resume_safe(f.name)}
    deepspeed = getattr(config, "deepspeed_plugin", None) is not None  # DeepSpeed has its own checkpoint format
    values |= {"rows": rows, "examples": data, "world_size": config.world_size, "under_deepspeed": deepspeed}
    return json.loads(json.dumps(values, default=str))


def _resume_safe(name: str) -> bool:
    return name in RESUME_SAFE_FIELDS or name.startswith(
        tuple(each for each in RESUME_SAFE_FIELDS if each.endswith("_"))
    )


def _difference(folder: Path, recipe: dict[str, Any]) -> str | None:
    """Describe the training of a checkpoint with another recipe; return None for the same recipe."""
    note = _state(folder).get("stateful_callbacks", {}).get(RecipeNote.__name__)
    if note is None:
        return "an unknown training"
    before = note["args"]["recipe"]
    for name, value in recipe.items():
        if name in before and before[name] != value:
            return f"a training with {name} {before[name]!r} instead of {value!r}"
    return None


def _finished(folder: Path) -> bool:
    state = _state(folder)
    return state["global_step"] >= state["max_steps"]


def _state(folder: Path) -> dict[str, Any]:
    return read_json(folder / STATE, "name an earlier checkpoint")
