"""Configuration of the training of a judge on hidden states: the keys of `recipes/train.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from parse_infer.errors import ParseError
from parse_train.judge.logprob.config import LogprobTrainingConfig


@dataclass
class StreamTrainingConfig(LogprobTrainingConfig):
    """Fields of the training that corrects a judge on log-probabilities by hidden states of the target: of the pass
    over the draft, and of a second stream that a LoRA reads.

    Raises:
        ValueError: a value out of range, or an unsupported option of `TrainingArguments`.
    """

    kind: ClassVar[str] = "stream"

    start_from: str | None = field(
        default=None,
        metadata={
            "help": "Adapter on log-probabilities, whose doubt is corrected, or the recipe that trains "
            "it first, on the same data and in OUTPUT_DIR/logprob (required)."
        },
    )
    target: str | None = field(
        default=None,
        metadata={"help": "Target model: Hugging Face id, folder, GGUF file or zoo:target; default: the build's."},
    )
    target_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype of the target; auto: as saved, or float32 on a CPU that is slow in 16 bits.",
            "choices": ["auto", "float32", "bfloat16"],
        },
    )
    hidden_layers: int = field(
        default=0,
        metadata={
            "help": "Number of layers, evenly spaced up to the last, whose states at the draft's own tokens the "
            "correction reads: the pass over the draft computes them anyway. 0: none."
        },
    )
    min_wrong_drafts: int = field(
        default=200,
        metadata={"help": "Refuse to train on fewer drafts with an error: the correction would learn them."},
    )
    stream_size: int = field(default=64, metadata={"help": "Inner size of the correction."})
    stream_dropout: float = field(default=0.1, metadata={"help": "Dropout of the correction's inner layer."})
    sure_share: float = field(
        default=0.01,
        metadata={
            "help": "Tokens are corrected that the first judge doubts by more than a floor, which training chooses: "
            "this share of the wrong drafts has no such token. 0: all tokens but the target's first choices."
        },
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the second stream's LoRA; 0: no second stream."})
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
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of adapter and head (AdamW)."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training drafts."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Drafts per process in evaluation."})

    def __post_init__(self) -> None:
        recomputes, self.activation_checkpointing = self.activation_checkpointing, False
        super().__post_init__()  # which refuses it for a head alone
        self.activation_checkpointing = recomputes
        if not self.start_from:
            raise ParseError(
                "the recipe needs the key start_from: an adapter on log-probabilities, or the recipe that trains it, "
                "recipes/train-logprob.yaml"
            )
        if self.stream_size < 1:
            raise ParseError(f"stream_size is {self.stream_size}; it must be at least 1")
        for key in ("lora_rank", "hidden_layers"):
            if getattr(self, key) < 0:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 0")
        if not 0 <= self.sure_share < 0.5:
            raise ParseError(f"sure_share is {self.sure_share}; it must be at least 0 and below 0.5")
        if not (self.lora_rank or self.hidden_layers):
            raise ParseError(
                "lora_rank and hidden_layers are 0, so nothing would be corrected: set one of them, or train "
                "recipes/train-logprob.yaml alone"
            )
        for key in ("lora_dropout", "stream_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ParseError(f"{key} is {getattr(self, key)}; it must be at least 0 and below 1")
