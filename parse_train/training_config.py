"""Base configurations of all trainings, on top of transformers' `TrainingArguments`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments

from parse_infer.errors import ParseError
from parse_infer.models.devices import multiplies_in_16_bits

IGNORED = -100  # label that the loss ignores, as in transformers' Trainer


@dataclass
class TrainingConfig(TrainingArguments):
    """Base of the configurations of all trainings."""

    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata={
            "help": "auto: the last complete checkpoint in output_dir, if any. restart: delete these checkpoints and "
            "start again. Any other value: the folder of a checkpoint."
        },
    )

    def __post_init__(self) -> None:
        if name := sharding(self.fsdp, self.deepspeed):
            raise ParseError(
                f"{name} shards the model's weights, which parse_train does not support: use plain DDP "
                "(recipes/accelerate/gpu-ddp.yaml) or DeepSpeed ZeRO-2 (recipes/accelerate/gpu-deepspeed-zero2.yaml)"
            )
        # Without an accelerator, transformers rejects bf16 unless use_cpu is set.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.use_cpu:  # peft imports an installed DeepSpeed, which would detect the device with a warning
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for key in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, key) < 1:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 1")
        if self.save_only_model:
            raise ParseError("save_only_model is not supported: resuming needs the optimiser's state")
        self.wants_bf16 = self.bf16  # on a GPU, which a plan is about
        if self.bf16 and self.use_cpu and not multiplies_in_16_bits(torch.device("cpu")):
            self.bf16 = False  # float32 takes at most a tenth of the time here
            if int(os.environ.get("RANK", 0)) == 0:
                print("bf16: this CPU has no bfloat16 instructions; training in float32, which is faster here")
        if self.use_cpu and _has_one_thread():
            print(
                "accelerate launch gives a CPU one thread by default: --config_file recipes/accelerate/cpu.yaml, or "
                f"OMP_NUM_THREADS={os.cpu_count()} before the command, trains with all cores"
            )
        self.remove_unused_columns = False  # the collators of this package select the columns
        super().__post_init__()
        if self.n_gpu > 1:
            raise ParseError(
                f"one process has {self.n_gpu} GPUs: start one process per GPU with `accelerate launch`, or select "
                "one GPU with CUDA_VISIBLE_DEVICES"
            )


def _has_one_thread() -> bool:
    """Whether `accelerate launch` started this only process with one of several threads."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1
    return launched and os.environ.get("OMP_NUM_THREADS") == "1" and (os.cpu_count() or 1) > 1


def sharding(fsdp: object, deepspeed: Mapping[str, Any] | str | None) -> str | None:
    """Return "FSDP" or "ZeRO-3" where `TrainingArguments` or the environment variables of `accelerate launch` enable
    either; else None.

    Args:
        fsdp, deepspeed: the fields of `TrainingArguments`; a DeepSpeed configuration is a mapping, a file or its text.
    """
    if fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "FSDP"
    stage = 0
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        deepspeed = deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage))
    if deepspeed:
        stage = HfDeepSpeedConfig(deepspeed).get_value("zero_optimization.stage", 0)
    return "ZeRO-3" if stage == 3 else None


@dataclass
class TrackedTrainingConfig(TrainingConfig):
    """Base configuration of trainings with a tracker."""

    kind: ClassVar[str] = "training"
    """Kind of recipe, as in `parse_train.recipe.RECIPES`."""

    report_to: None | str | list[str] = field(  # noqa: RUF036  (the parser of TRL needs this order)
        default="wandb", metadata={"help": "Tracker of the metrics, or none."}
    )
    project: str = field(default="parse", metadata={"help": "Project in the tracker."})
    artifacts: str = field(
        default="reference",
        metadata={
            "help": "Data set and trained model in the tracker: reference (paths and hashes), upload (also files) or "
            "none.",
            "choices": ["reference", "upload", "none"],
        },
    )
