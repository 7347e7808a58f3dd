"""Configuration of validity training: the keys of `recipes/train.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_tools.labels.layouts import LAYOUTS
from parse_infer.judge.cuts import CutPolicy
from parse_train.training_config import TrackedTrainingConfig

# transformers decides about these itself; set otherwise they would break the recipe in ways hard to see.
NOT_SUPPORTED = {
    "fp16": "use bf16, whose range needs no loss scaling",
    "torch_compile": "batches differ in shape from step to step",
    "activation_checkpointing": "the context runs without gradient, so there is nothing to recompute",
    "auto_find_batch_size": "a resumed run would see other batches",
    "push_to_hub": "the adapter folder is exported to adapter_dir; upload that",
    "label_smoothing_factor": "the head learns yes or no; uncertain labels weigh less instead",
    "neftune_noise_alpha": "the target is frozen",
    "bf16_full_eval": "the head computes in float32; target_dtype is the target's own",
    "prediction_loss_only": "the threshold is chosen from predictions",
}


@dataclass
class ValidityTrainingConfig(TrackedTrainingConfig):
    """Fields on top of transformers' `TrainingArguments`, whose batch sizes count drafts here.

    Raises:
        ValueError: a value out of range, or an option of `TrainingArguments` that this training does not support.
    """

    target: str = field(
        default="", metadata={"help": "Target model: Hugging Face id, folder, GGUF file or zoo:target (required)."}
    )
    target_dtype: str = field(
        default="auto",
        metadata={
            "help": "Number type the target is loaded in; auto: as saved; float32 on CPUs that are slow in 16 bits.",
            "choices": ["auto", "float32", "bfloat16"],
        },
    )
    data: str = field(
        default="",
        metadata={
            "help": "Labelled drafts: a folder written by `parse-data build`, a .jsonl file, or the Hub id of "
            "a process-supervision set (required)."
        },
    )
    layout: str = field(
        default="build",
        metadata={
            "help": "Layout of the rows in `data`: build, or that of a public set, whose labels are about steps.",
            "choices": list(LAYOUTS),
        },
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Labelled drafts for evaluation; else a share of the problems of `data` is held out."},
    )
    eval_layout: str | None = field(
        default=None, metadata={"help": "Layout of `eval_data`; by default that of `data`.", "choices": list(LAYOUTS)}
    )
    eval_share: float = field(default=0.1, metadata={"help": "Share of the problems held out for evaluation."})
    max_length: int = field(default=1024, metadata={"help": "Longer rows (prompt and draft, tokens) are left out."})
    step_separator: str = field(
        default="\n", metadata={"help": "Put after each segment of rows without draft_ids that has no line break."}
    )
    template_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Switches of the chat template (enable_thinking: false); by default those of the build."},
    )
    cut_policy: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "How drafts are cut at inference (kind, every, max_cuts); by default as the data was."},
    )

    probe_text: str = field(
        default="\nCorrect?",
        metadata={
            "help": "Text of the probe, tokenised with special tokens as such. Shorter is cheaper: the adapter learns "
            "what it asks. Empty: no probe and no update, single tokens alone decide (token_rank)."
        },
    )
    verbalizer_yes: str = field(default="Correct", metadata={"help": "Word whose first token starts the head: valid."})
    verbalizer_no: str = field(default="Incorrect", metadata={"help": "Word whose first token starts it: not valid."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the low-rank update."})
    token_rank: int = field(
        default=64,
        metadata={
            "help": "Inner size of the network that compares draft tokens with the target's own; 0: none, the probe "
            "alone decides."
        },
    )
    token_dropout: float = field(
        default=0.0,
        metadata={"help": "Dropout of the target's states that this network reads; with few drafts 0.5 pays."},
    )
    state_store_gib: float = field(
        default=4.0,
        metadata={
            "help": "Without a probe the target says the same of a draft in every epoch: keep so much of it in memory "
            "(per process), so that only the first epoch runs the target."
        },
    )
    surprise_vocab_size: int = field(
        default=0,
        metadata={
            "help": "Compare draft tokens with this many tokens of the vocabulary, the most frequent ones in the "
            "training drafts, instead of all (0): where the vocabulary is large that is most of token doubt's cost."
        },
    )
    lora_alpha: int = field(default=32, metadata={"help": "The update is scaled by lora_alpha / lora_rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of the low-rank update."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Names of the adapted linear layers."}
    )
    backprop_context: bool = field(
        default=False,
        metadata={
            "help": "Back-propagate through prompt and draft too. Gives the same gradients at a higher cost; only "
            "there to be measured."
        },
    )

    class_weighting: str = field(
        default="none",
        metadata={
            "help": "balanced: both classes weigh the same in the loss (validities are then no probabilities).",
            "choices": ["none", "balanced"],
        },
    )

    risk_alpha: float = field(
        default=0.05, metadata={"help": "One pass may accept a wrong prefix of at most this share of the drafts ..."}
    )
    risk_delta: float = field(
        default=0.1, metadata={"help": "... with a confidence of 1 - risk_delta; this picks the threshold."}
    )
    risk_temperature: float | None = field(
        default=None,
        metadata={
            "help": "... over held-out drafts sampled at this temperature, that of the drafts to be served; default: "
            "all. With one draft per problem the drafts are independent, as the confidence supposes."
        },
    )
    calibration_problems: int = field(
        default=300,
        metadata={
            "help": "At the end, calibrate the pair on this many problems of the task's validation split (0: do not), "
            "so that the adapter carries a promise about requests (`parse-infer calibrate`). For data of a build."
        },
    )
    calibration_risks: list[float] = field(
        default_factory=lambda: [0.01, 0.02, 0.05, 0.1],
        metadata={"help": "Shares of requests that may be lost, one promise for each."},
    )
    baselines: bool = field(
        default=True,
        metadata={"help": "Also evaluate the zero-shot judge, the target's token probabilities and the KL judge."},
    )
    draft: str | None = field(
        default=None,
        metadata={"help": "Draft model that wrote the data, for the KL judge; by default the one its build names."},
    )
    adapter_dtype: str = field(
        default="float32",
        metadata={
            "help": "Number type of the exported update; bfloat16 halves the file. All figures are those of what is "
            "exported.",
            "choices": ["float32", "bfloat16"],
        },
    )
    adapter_dir: str | None = field(
        default=None, metadata={"help": "Folder of the exported adapter; by default adapter/ in output_dir."}
    )

    # Defaults of TrainingArguments that suit this training.
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of adapter and head (AdamW)."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning rate after warm-up."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Warm-up steps, or their share if below 1."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training drafts."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Drafts per process and step."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Drafts per process in evaluation."})
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={
            "help": "group_by_length: batches of drafts of similar length. Else random or sequential.",
            "choices": ["group_by_length", "random", "sequential"],
        },
    )
    logging_steps: float = field(default=10, metadata={"help": "Steps between two log lines, or their share."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps, epoch."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints kept."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every trained parameter takes part in every step, so nothing is searched."}
    )

    def __post_init__(self) -> None:
        self.label_names = ["labels", "cuts"]
        super().__post_init__()
        for key in ("target", "data", "output_dir"):
            if not getattr(self, key):
                raise ValueError(f"the recipe needs the key {key}")
        for key, reason in NOT_SUPPORTED.items():
            if getattr(self, key):
                raise ValueError(f"{key} is not supported here: {reason}")
        for key in ("eval_share", "risk_alpha", "risk_delta"):
            if not 0 < getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must lie between 0 and 1")
        for key in ("max_length", "lora_rank"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("token_rank", "surprise_vocab_size"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 0")
        if not (self.probe_text or self.token_rank):
            raise ValueError("probe_text is empty and token_rank is 0: a head needs one of the two to judge by")
        for key in ("lora_dropout", "token_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 0 and below 1")
        if self.state_store_gib < 0:
            raise ValueError(f"state_store_gib is {self.state_store_gib}; it must be at least 0 (store nothing)")
        CutPolicy.from_dict(self.cut_policy)  # names a wrong key or value
        if self.adapter_dir is None:
            self.adapter_dir = f"{self.output_dir}/adapter"
