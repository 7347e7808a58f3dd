"""What every training has on top of transformers' `TrainingArguments`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
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


@dataclass
class TrackedTrainingConfig(TrainingConfig):
    """Of the trainings that users run."""

    report_to: None | str | list[str] = field(default="wandb", metadata={"help": "Where metrics go, or none."})
    project: str = field(default="parse", metadata={"help": "Project of the tracker."})
