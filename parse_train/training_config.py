"""What every training has on top of transformers' `TrainingArguments`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import HfDeepSpeedConfig
from transformers import TrainingArguments

from parse_infer.models.devices import multiplies_in_16_bits

IGNORED = -100  # a label that says nothing, as transformers' Trainer expects it


@dataclass
class TrainingConfig(TrainingArguments):
    """Base of the configurations of all trainings."""

    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata={
            "help": "auto: the last complete checkpoint in output_dir, if any. restart: delete the checkpoints there "
            "and start anew. Else the folder of a checkpoint."
        },
    )

    def __post_init__(self) -> None:
        if name := sharding(self.fsdp, self.deepspeed):
            raise ValueError(
                f"{name} shards the model's weights, which no training here supports: use plain DDP "
                "(recipes/accelerate/gpu-ddp.yaml) or DeepSpeed ZeRO-2 (recipes/accelerate/gpu-deepspeed-zero2.yaml)"
            )
        # transformers refuses bf16 on a machine without an accelerator unless it is told to use the CPU.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.use_cpu:  # DeepSpeed (which peft imports wherever it is installed) would guess, and warn
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if self.save_only_model:
            raise ValueError("save_only_model is not supported here: without the optimiser's state nothing resumes")
        if self.bf16 and self.use_cpu and not multiplies_in_16_bits(torch.device("cpu")):
            self.bf16 = False  # the same training, at a tenth of the time and less
            if int(os.environ.get("RANK", 0)) == 0:
                print("bf16: this CPU has no instructions for it; training in float32, which is faster here")
        self.remove_unused_columns = False  # the models' own collators know what is used
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"one process has {self.n_gpu} GPUs: start one for each with `accelerate launch`, or name one in "
                "CUDA_VISIBLE_DEVICES"
            )


def sharding(fsdp: Any, deepspeed: Any) -> str | None:
    """What would shard the model's weights: "FSDP" or "ZeRO-3", asked for by `TrainingArguments` or by `accelerate
    launch`, which sets environment variables. None otherwise.

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
    """Of the trainings that users run."""

    report_to: None | str | list[str] = field(  # noqa: RUF036  (the parser of TRL needs this order)
        default="wandb", metadata={"help": "Where metrics go, or none."}
    )
    project: str = field(default="parse", metadata={"help": "Project of the tracker."})
    artifacts: str = field(
        default="reference",
        metadata={
            "help": "Data set and result in the tracker: reference (their paths and hashes), upload (the files too), "
            "none.",
            "choices": ["reference", "upload", "none"],
        },
    )
