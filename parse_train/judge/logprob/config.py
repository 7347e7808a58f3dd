"""Configuration of the training on log-probabilities: the keys of `recipes/train-logprob.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from parse_infer.errors import ParseError
from parse_infer.judge.logprob_head import LogprobHeadConfig
from parse_train.judge.config import JudgeTrainingConfig


@dataclass
class LogprobTrainingConfig(JudgeTrainingConfig):
    """Fields of the training of a head on log-probabilities.

    Raises:
        ValueError: a value out of range, or an unsupported option of `TrainingArguments`.
    """

    kind: ClassVar[str] = "logprob"

    more_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Further builds with the same target to train on alone, such as one with another draft model."
        },
    )
    start_from: str | None = field(
        default=None,
        metadata={"help": "Adapter of any pair whose head this training continues, where drafts are few."},
    )
    min_wrong_drafts: int = field(
        default=5,
        metadata={"help": "Refuse to train on fewer drafts with an error, counted without the held-out problems."},
    )
    k: int = field(default=5, metadata={"help": "Number of the target's first choices to read; at most as stored."})
    width: int = field(default=64, metadata={"help": "Size of the layers and of the recurrent state."})
    text_size: int = field(
        default=32,
        metadata={"help": "Size of a token's embedding; 0: the judge knows flags of a token, and not its text."},
    )
    buckets: int = field(default=8192, metadata={"help": "Hash values of the byte n-grams of tokens."})
    sharpness: float = field(
        default=8.0,
        metadata={
            "help": "How verdicts pool the doubt about tokens, from 1 to 50. 1: by the sum, as in training, so a "
            "token may be corrected for the doubt before it. Higher: nearly by the most doubtful token alone."
        },
    )
    noise: float = field(
        default=0.06,
        metadata={"help": "Largest noise of log-probabilities in training: bfloat16 logits near 20 step by 0.125."},
    )
    certain_share: float = field(
        default=0.1,
        metadata={
            "help": "Share of the tokens equal to the target's first choice that training shows as the target's own, "
            "like the tokens that it writes itself in an answer."
        },
    )
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate (AdamW)."})
    num_train_epochs: float = field(default=8.0, metadata={"help": "Passes over the training drafts."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Drafts per process and step."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Drafts per process in evaluation."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("k", "width", "buckets"):
            if getattr(self, key) < 1:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("text_size", "noise", "certain_share"):
            if getattr(self, key) < 0:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 0")
        if self.activation_checkpointing:
            raise ParseError("activation_checkpointing is set, but this recipe trains a small head and no layers")
        if not 1 <= self.sharpness <= 50:  # odds to a higher power overflow
            raise ParseError(f"sharpness is {self.sharpness}; it must be from 1 to 50")
        if self.certain_share > 1:
            raise ParseError(f"certain_share is {self.certain_share}; it must be at most 1")

    @property
    def head(self) -> LogprobHeadConfig:
        return LogprobHeadConfig(self.k, self.width, self.text_size, self.buckets, self.sharpness)
