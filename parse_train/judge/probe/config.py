"""Configuration of the training of a head on hidden states: the keys of `recipes/train-probe.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from data_tools.labels.layouts import LAYOUTS
from parse_infer.errors import ParseError
from parse_train.judge.config import JudgeTrainingConfig


@dataclass
class ValidityTrainingConfig(JudgeTrainingConfig):
    """Fields of the training of a head on hidden states.

    Raises:
        ValueError: a value out of range, or an unsupported option of `TrainingArguments`.
    """

    kind: ClassVar[str] = "validity"

    target: str = field(
        default="", metadata={"help": "Target model: Hugging Face id, folder, GGUF file or zoo:target (required)."}
    )
    target_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype of the target; auto: as saved, or float32 on a CPU that is slow in 16 bits.",
            "choices": ["auto", "float32", "bfloat16"],
        },
    )
    layout: str = field(
        default="build",
        metadata={
            "help": "Layout of the rows in `data`: build, or the layout of a public set with labels of steps.",
            "choices": list(LAYOUTS),
        },
    )
    eval_layout: str | None = field(
        default=None, metadata={"help": "Layout of `eval_data`; default: layout.", "choices": list(LAYOUTS)}
    )
    step_separator: str = field(
        default="\n", metadata={"help": "In rows without draft_ids: text appended to a segment without line break."}
    )

    probe_text: str = field(
        default="\nCorrect?",
        metadata={
            "help": "Text of the probe; special tokens are allowed. A shorter probe is cheaper, and the adapter "
            "learns its meaning. Empty: no probe and no LoRA; only token doubt decides (token_rank)."
        },
    )
    verbalizer_yes: str = field(
        default="Correct",
        metadata={"help": "Word for valid. Without token doubt, its first token initialises the head."},
    )
    verbalizer_no: str = field(
        default="Incorrect",
        metadata={"help": "Word for invalid. Without token doubt, its first token initialises the head."},
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the LoRA."})
    token_rank: int = field(
        default=64,
        metadata={
            "help": "Inner size of token doubt, which compares draft tokens with the target's own choices; 0: no "
            "token doubt, only the probe decides."
        },
    )
    token_dropout: float = field(
        default=0.0,
        metadata={"help": "Dropout of the target's states in token doubt; 0.5 helps with few drafts."},
    )
    state_store_gib: float = field(
        default=4.0,
        metadata={
            "help": "Memory per process (GiB) for the target's states of drafts. Without a probe they are equal in "
            "all epochs, so only the first epoch runs the target."
        },
    )
    surprise_vocab_size: int = field(
        default=0,
        metadata={
            "help": "Token doubt compares draft tokens with this number of tokens, the most frequent in the "
            "training drafts; 0: all. A large vocabulary is most of the cost of token doubt."
        },
    )
    lora_alpha: int = field(default=32, metadata={"help": "The LoRA update is scaled by lora_alpha / lora_rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the LoRA."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Names of the adapted linear layers."}
    )

    adapter_dtype: str = field(
        default="float32",
        metadata={
            "help": "Dtype of the exported LoRA; bfloat16 halves the file. All figures describe the exported weights.",
            "choices": ["float32", "bfloat16"],
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target:
            raise ParseError("the recipe needs the key target")
        if self.activation_checkpointing and not self.probe_text:
            raise ParseError(
                "activation_checkpointing is set, but probe_text is empty: without a probe no layer has a gradient"
            )
        if self.lora_rank < 1:
            raise ParseError(f"lora_rank is {self.lora_rank}; it must be at least 1")
        for key in ("token_rank", "surprise_vocab_size"):
            if getattr(self, key) < 0:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 0")
        if not (self.probe_text or self.token_rank):
            raise ParseError("probe_text is empty and token_rank is 0: set one of them, because a head needs an input")
        for key in ("lora_dropout", "token_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 0 and below 1")
        if self.state_store_gib < 0:
            raise ParseError(f"state_store_gib is {self.state_store_gib}; it must be at least 0 (store nothing)")
