"""Configuration of the recipe `language_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parse_infer.errors import ParseError
from parse_train.training_config import TrainingConfig


@dataclass
class LanguageModelConfig(TrainingConfig):
    """Fields on top of transformers' `TrainingArguments`; `per_device_train_batch_size` counts concatenated rows."""

    tokenizer: str = field(default="", metadata={"help": "Tokenizer folder, or the name of a model."})
    model_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Architecture: `model_type` and the fields of that model's configuration."},
    )
    task: str = field(default="gsm_symbolic", metadata={"help": "Task whose worked solutions are training data."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    initial_model: str | None = field(
        default=None,
        metadata={"help": "Model of the same width whose weights initialise this model; default: random weights."},
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "Rank of a LoRA on all linear layers of initial_model; 0: train all weights."},
    )
    lora_alpha: int = field(default=32, metadata={"help": "The LoRA update is scaled by lora_alpha / lora_rank."})
    lora_energy: float = field(
        default=1.0,
        metadata={
            "help": "Below 1: export each layer's LoRA with the lowest rank that keeps this share of its energy "
            "(squared singular values), for a smaller file."
        },
    )
    initial_lora: str | None = field(
        default=None, metadata={"help": "Folder of a LoRA of the same rank that initialises this LoRA."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja chat template that replaces the tokenizer's own."}
    )
    initial_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Layers of initial_model that initialise this model's layers, in order; default: all. "
            "A repeated layer is initialised to the identity."
        },
    )
    loss_tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Only the tokens of this reduced vocabulary, and of the batch, compete in the loss; the others do "
            "not change. With 49,152 tokens and two CPU cores a step is a fifth shorter."
        },
    )
    answers_of: str | None = field(
        default=None,
        metadata={
            "help": "Model (folder or name) whose right answers are additional training data: a target accepts more "
            "of a draft in its own wording (arXiv 1606.07947)."
        },
    )
    answer_share: float = field(default=0.7, metadata={"help": "Share of the model's answers among all answers."})
    n_answers: int = field(
        default=5000, metadata={"help": "Number of problems that answers_of answers before the training."}
    )
    answer_temperature: float = field(default=0.5, metadata={"help": "Temperature of answers_of; 0 is greedy."})
    row_length: int = field(default=320, metadata={"help": "Tokens in a row of concatenated samples."})
    drill_share: float = field(
        default=0.25, metadata={"help": "Share of arithmetic drills among the samples at the start."}
    )
    drill_until: float = field(
        default=0.7, metadata={"help": "Share of the training after which drill_share has fallen linearly to zero."}
    )
    drill_max_number: int = field(default=300, metadata={"help": "Largest number in a drill."})
    drill_in_parts: bool = field(default=False, metadata={"help": "Drills work out every operation in parts."})
    torch_compile_backbone: bool = field(
        default=True, metadata={"help": "Compile the layers, without the output layer."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokenizer:
            raise ParseError(
                "the recipe needs the key tokenizer: the output of recipes/zoo/tokenizer.yaml or a Hugging Face id"
            )
        if self.lora_rank and (self.initial_model is None or self.model_config or self.initial_layers):
            raise ParseError("lora_rank needs initial_model, and excludes model_config and initial_layers")
        for name, lowest in (("row_length", 2), ("n_answers", 1), ("drill_max_number", 20)):
            if (value := getattr(self, name)) < lowest:
                raise ParseError(f"{name} is {value}; it must be at least {lowest}")
        for name in ("answer_share", "drill_share"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ParseError(f"{name} is {share}; it must be from 0 to 1")
        if self.drill_until <= 0:
            raise ParseError(f"drill_until is {self.drill_until}; it must be above 0")
        if not 0 < self.lora_energy <= 1:
            raise ParseError(f"lora_energy is {self.lora_energy}; it must be above 0 and at most 1")
        if not self.lora_rank and "model_type" not in self.model_config:
            raise ParseError("the recipe's model_config needs model_type, for example llama")
        if self.world_size > 1 or self.dataloader_num_workers:
            raise ParseError(
                "this recipe trains in one process without dataloader workers: each would read the same stream of rows"
            )
        if self.max_steps <= 0:
            raise ParseError(
                f"max_steps is {self.max_steps}; the data is an endless stream, so max_steps must be at least 1"
            )
