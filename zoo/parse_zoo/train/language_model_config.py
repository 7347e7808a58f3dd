"""The recipe `language_model`: what is learnt, from which weights, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parse_train.training_config import TrainingConfig


@dataclass
class LanguageModelConfig(TrainingConfig):
    """Fields on top of transformers' `TrainingArguments`; `per_device_train_batch_size` counts packed rows."""

    tokenizer: str = field(default="", metadata={"help": "Tokenizer folder, or the name of a model."})
    model_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Architecture: `model_type` and the fields of that model's configuration."},
    )
    task: str = field(default="gsm_symbolic", metadata={"help": "Task whose worked answers are learnt."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    initial_model: str | None = field(
        default=None,
        metadata={"help": "Start from these weights (the name of a model) instead of random ones; same width."},
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "Train a LoRA of this rank on all linears of initial_model; 0: train all its weights."},
    )
    lora_alpha: int = field(default=32, metadata={"help": "The LoRA's update is scaled by lora_alpha / lora_rank."})
    lora_energy: float = field(
        default=1.0,
        metadata={
            "help": "Below 1: each layer's update is exported with the lowest rank that keeps this share of its "
            "energy (its squared singular values), for a smaller file."
        },
    )
    initial_lora: str | None = field(
        default=None, metadata={"help": "Folder of a LoRA of that rank to go on from, instead of a fresh one."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja chat template that replaces the tokenizer's own."}
    )
    initial_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Which layers of initial_model become this model's layers, in order; all of them by default. "
            "A layer named again starts as one that changes nothing."
        },
    )
    loss_tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Only the tokens of this reduced vocabulary, and of the batch, compete in the loss; all others "
            "are left as they are: with 49,152 tokens and two CPU cores a step is a fifth shorter."
        },
    )
    answers_of: str | None = field(
        default=None,
        metadata={
            "help": "A model (folder or name) whose right answers are learnt beside the task's own: more is kept of a "
            "draft that is worded like its target (arXiv 1606.07947)."
        },
    )
    answer_share: float = field(default=0.7, metadata={"help": "Share of the model's answers among all answers."})
    n_answers: int = field(
        default=5000, metadata={"help": "Problems that answers_of answers once, before the training."}
    )
    answer_temperature: float = field(default=0.5, metadata={"help": "Temperature of those answers; 0 is greedy."})
    row_length: int = field(default=320, metadata={"help": "Tokens in a packed row."})
    drill_share: float = field(
        default=0.25, metadata={"help": "Share of arithmetic drills among the samples at the start."}
    )
    drill_until: float = field(
        default=0.7, metadata={"help": "The share falls linearly to zero at this part of the training."}
    )
    drill_max_number: int = field(default=300, metadata={"help": "Largest number in a drill."})
    drill_in_parts: bool = field(
        default=False, metadata={"help": "Drills with products and quotients worked out in parts."}
    )
    torch_compile_backbone: bool = field(default=True, metadata={"help": "Compile the layers (not the output head)."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokenizer:
            raise ValueError(
                "the recipe needs the key tokenizer: a folder made by recipes/zoo/tokenizer.yaml or a Hugging Face id"
            )
        if self.lora_rank and (self.initial_model is None or self.model_config or self.initial_layers):
            raise ValueError("lora_rank needs initial_model, and neither model_config nor initial_layers beside it")
        if not 0 < self.lora_energy <= 1:
            raise ValueError(f"lora_energy is {self.lora_energy}; it must be above 0 and at most 1")
        if not self.lora_rank and "model_type" not in self.model_config:
            raise ValueError("the recipe's model_config needs model_type, for example llama")
        if self.world_size > 1 or self.dataloader_num_workers:
            raise ValueError(
                "this recipe trains in one process, without dataloader workers: each would get the same stream of rows"
            )
        if self.max_steps <= 0:
            raise ValueError(
                f"max_steps is {self.max_steps}; the data is an endless stream, so the recipe must say how many steps"
            )
