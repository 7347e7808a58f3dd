"""Configuration that the trainings of all judges share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parse_infer.errors import ParseError
from parse_infer.text.cuts import CutPolicy
from parse_train.training_config import TrackedTrainingConfig

# Options of TrainingArguments that would break this training without an error.
NOT_SUPPORTED = {
    "fp16": "use bf16, whose range needs no loss scaling",
    "torch_compile": "batches differ in shape from step to step",
    "activation_checkpointing_kwargs": "activation_checkpointing: true runs every layer of the target again",
    "auto_find_batch_size": "a resumed run would see other batches",
    "push_to_hub": "the adapter folder is exported to adapter_dir; upload that",
    "label_smoothing_factor": "the head learns yes or no; uncertain labels weigh less instead",
    "neftune_noise_alpha": "the target is frozen",
    "bf16_full_eval": "the head computes in float32; target_dtype is the target's own",
    "load_best_model_at_end": "the held-out drafts would choose the checkpoint and then set the threshold's bound",
    "prediction_loss_only": "the threshold is chosen from predictions",
}


@dataclass
class JudgeTrainingConfig(TrackedTrainingConfig):
    """Fields of all judges' trainings, on top of transformers' `TrainingArguments`; batch sizes count drafts.

    Raises:
        ValueError: a value out of range, or an unsupported option of `TrainingArguments`.
    """

    data: str = field(
        default="",
        metadata={
            "help": "Labelled drafts with log-probabilities: a folder written by `parse-data build` (required)."
        },
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Labelled drafts for evaluation; default: eval_share of the problems in `data`."},
    )
    eval_share: float = field(default=0.1, metadata={"help": "Share of the problems held out for evaluation."})
    max_length: int = field(
        default=1024, metadata={"help": "Maximum tokens of a draft without its prompt; longer drafts are left out."}
    )
    template_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Options of the chat template (enable_thinking: false); default: as in the build."},
    )
    cut_policy: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Where drafts are cut at inference (kind, every, max_cuts); default: as in the data."},
    )
    risk_alpha: float = field(
        default=0.05,
        metadata={"help": "Maximum share of drafts of which one pass accepts a wrong prefix; sets the threshold."},
    )
    risk_delta: float = field(default=0.1, metadata={"help": "The bound risk_alpha has confidence 1 - risk_delta."})
    risk_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Temperature of the held-out drafts that set the threshold, as in serving; default: any. One "
            "draft per problem, chosen at random, sets the threshold."
        },
    )
    calibration_problems: int = field(
        default=300,
        metadata={
            "help": "Number of validation problems on which to calibrate the adapter after training (`parse-infer "
            "calibrate`); 0: no calibration. Needs data of a build."
        },
    )
    calibration_risks: list[float] = field(
        default_factory=lambda: [0.01, 0.02, 0.05, 0.1],
        metadata={"help": "Risks to calibrate: maximum shares of requests that lose their right answer."},
    )
    adapter_dir: str | None = field(
        default=None, metadata={"help": "Folder of the exported adapter; default: OUTPUT_DIR/adapter."}
    )

    # Defaults of TrainingArguments that suit this training.
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of adapter and head (AdamW)."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule after warm-up."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Warm-up steps, or their share of all if below 1."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training drafts."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Drafts per process and step."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Drafts per process in evaluation."})
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={
            "help": "group_by_length (batches of drafts of similar length), random or sequential.",
            "choices": ["group_by_length", "random", "sequential"],
        },
    )
    logging_steps: float = field(
        default=10, metadata={"help": "Steps between log lines, or their share of all if below 1."}
    )
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps, epoch."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints kept."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Search for unused parameters; every step uses all trained parameters."}
    )

    def __post_init__(self) -> None:
        self.label_names = ["labels", "cuts"]
        super().__post_init__()
        for key in ("data", "output_dir"):
            if not getattr(self, key):
                raise ParseError(f"the recipe needs the key {key}")
        for key, reason in NOT_SUPPORTED.items():
            if getattr(self, key, None):  # transformers 5.18 lacks some of these options
                raise ParseError(f"{key} is not supported here: {reason}")
        for key in ("eval_share", "risk_alpha", "risk_delta"):
            if not 0 < getattr(self, key) < 1:
                raise ParseError(f"{key} is {getattr(self, key)}; it must lie between 0 and 1")
        if self.max_length < 1:
            raise ParseError(f"max_length is {self.max_length}; it must be at least 1")
        CutPolicy.from_dict(self.cut_policy)  # raises ValueError for a wrong key or value
        if self.adapter_dir is None:
            self.adapter_dir = f"{self.output_dir}/adapter"
