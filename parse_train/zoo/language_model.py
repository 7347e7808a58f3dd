"""Train the small language models that ship with the package (`recipes/zoo/*.yaml`).

Worked answers of a task, or those that another model writes, are packed into rows of fixed length, each attending to
itself only; the loss counts answer tokens alone (questions are mostly names and numbers drawn at random). Those of the
task are streamed, never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from data_tools.tasks.by_name import load_task
from data_tools.tasks.drills import drill
from data_tools.tasks.task import Problem
from parse_infer.files import replacing_folder
from parse_infer.models.loading import load_language_model, load_tokenizer, load_weights
from parse_infer.models.lora import describe_base, write_base
from parse_train import checkpoints
from parse_train.own_answers import AnswerConfig, read_answers, write_answers
from parse_train.training_config import TrainingConfig
from parse_train.zoo.muon import MuonWithAdamW

IGNORED = -100


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
        if not self.lora_rank and "model_type" not in self.model_config:
            raise ValueError("the recipe's model_config needs model_type, for example llama")
        if self.max_steps <= 0:
            raise ValueError(
                f"max_steps is {self.max_steps}; the data is an endless stream, so the recipe must say how many steps"
            )


class PackedSamples(IterableDataset):
    """Endless stream of packed rows: `input_ids`, `labels`, `position_ids`, `document`, each LongTensor [row_length].

    `document` numbers the samples of a row; padding has document -1.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        answers: Sequence[tuple[Problem, str]] = (),
    ) -> None:
        self.config, self.tokenizer, self.answers = config, tokenizer, answers
        self.total_rows = config.max_steps * config.per_device_train_batch_size * config.gradient_accumulation_steps

    def _samples(self, rng: Random, progress: list[float]) -> Iterator[tuple[list[int], list[int]]]:
        c, tokenizer = self.config, self.tokenizer
        task = load_task(c.task, **c.task_options)
        own = ((problem, problem.solution) for problem in task.problems("train", seed=c.seed))
        theirs = _endlessly(self.answers, rng)
        while True:
            while rng.random() < c.drill_share * max(0.0, 1 - progress[0] / c.drill_until):
                ids = tokenizer(
                    drill(rng, c.drill_max_number, in_parts=c.drill_in_parts), add_special_tokens=False
                ).input_ids + [tokenizer.eos_token_id]
                yield ids, list(ids)
            problem, solution = next(theirs if self.answers and rng.random() < c.answer_share else own)
            if solution is None:
                raise ValueError(
                    f"task {c.task} has no worked answer for problem {problem.id}; a language model needs one"
                )
            messages = (
                problem.prompt if isinstance(problem.prompt, list) else [{"role": "user", "content": problem.prompt}]
            )
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            answer = tokenizer(solution, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            yield prompt + answer, [IGNORED] * len(prompt) + answer

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        length, progress, rows = self.config.row_length, [0.0], 0
        samples = (s for s in self._samples(Random(self.config.seed), progress) if len(s[0]) <= length)
        pool: list[tuple[list[int], list[int]]] = []
        while True:
            while len(pool) < 64:
                pool.append(next(samples))
            row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "document": []}
            document = 0
            while True:  # first fit: the oldest waiting sample that still has room
                room = length - len(row["input_ids"])
                fit = next((i for i, sample in enumerate(pool) if len(sample[0]) <= room), None)
                if fit is None:
                    break
                ids, labels = pool.pop(fit)
                row["input_ids"] += ids
                # The first token of a sample must not be predicted from the sample before it.
                row["labels"] += [IGNORED] + labels[1:]
                row["position_ids"] += range(len(ids))
                row["document"] += [document] * len(ids)
                document += 1
            pad = length - len(row["input_ids"])
            fill = {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORED, "position_ids": 0, "document": -1}
            yield {key: torch.tensor(values + [fill[key]] * pad) for key, values in row.items()}
            rows += 1
            progress[0] = rows / self.total_rows


def _endlessly(answers: Sequence[tuple[Problem, str]], rng: Random) -> Iterator[tuple[Problem, str]]:
    while answers:
        yield from rng.sample(answers, len(answers))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows; the attention mask [B, 1, T, T] is causal within each document."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    document = batch.pop("document")
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    batch["attention_mask"] = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
    return batch


class LanguageModelTrainer(Trainer):
    """Trainer with Muon (a LoRA has AdamW), a compiled backbone and logits at answer tokens only."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if isinstance(self.model, PeftModel):
            return super().create_optimizer(model)
        if self.optimizer is None:
            model = cast(PreTrainedModel, self.model)
            self.optimizer = MuonWithAdamW(
                model, [model.get_output_embeddings().weight], self.args.learning_rate, self.args.weight_decay
            )
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")[:, 1:]
        core: Any = self.accelerator.unwrap_model(model)
        core = core.get_base_model() if isinstance(core, PeftModel) else core
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = core.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
            kept = labels != IGNORED
            logits = core.lm_head(hidden[kept])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[kept])
        return (loss, None) if return_outputs else loss


def main(config: LanguageModelConfig) -> None:
    """Train from scratch, or go on from a checkpoint, and save model and tokenizer in `output_dir`/final."""
    tokenizer = load_tokenizer(config.tokenizer)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    torch.manual_seed(config.seed)
    model: Any
    model, base = with_lora(config) if config.lora_rank else (all_weights(config, tokenizer), {})
    if config.torch_compile_backbone:
        getattr(model, "get_base_model", lambda: model)().model.compile()
    start = checkpoints.prepare(config)
    trainer = LanguageModelTrainer(
        model=model,
        args=config,
        train_dataset=PackedSamples(config, tokenizer, right_answers(config)),
        data_collator=collate,
        processing_class=tokenizer,
    )
    checkpoints.train(trainer, start)
    if config.process_index == 0:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        with replacing_folder(f"{config.output_dir}/final") as final:
            if config.lora_rank:
                model.peft_config["default"].base_model_name_or_path = config.initial_model
                # The embedding is not adapted; left to itself, peft asks the Hub whether it has grown.
                model.bfloat16().save_pretrained(final, save_embedding_layers=False)
                write_base(final, base)
            else:
                save_half(model, final)
            tokenizer.save_pretrained(final)


def right_answers(config: LanguageModelConfig) -> list[tuple[Problem, str]]:
    """The right ones among what `answers_of` answers to the first training problems; kept in `output_dir`/answers."""
    if config.answers_of is None:
        return []
    lm = load_language_model(config.answers_of, role="target", device=config.device)
    wanted = AnswerConfig(
        model=config.answers_of,
        task=config.task,
        task_options=config.task_options,
        answer_temperature=config.answer_temperature,
    )
    folder = Path(str(config.output_dir)) / "answers"
    write_answers(lm, wanted, config.seed, "train", config.n_answers, folder)
    task = load_task(config.task, **config.task_options)
    problems = task.problems("train", seed=config.seed, limit=config.n_answers)
    answers = []
    for problem, row in zip(problems, read_answers(folder, "train", config.n_answers), strict=True):
        answer = str(lm.tokenizer.decode(row["input_ids"][row["start"] :], skip_special_tokens=True))
        if task.check(problem, answer):
            answers.append((problem, answer))
    print(f"{len(answers)} of {config.n_answers} answers of {config.answers_of} are right")
    return answers


def all_weights(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model of the recipe's architecture, with random weights or those of `initial_model`."""
    fields = dict(config.model_config)
    architecture = AutoConfig.for_model(
        fields.pop("model_type"),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    model = AutoModelForCausalLM.from_config(architecture)
    if config.initial_model is not None:
        start_from(model, config.initial_model, config.initial_layers, tokenizer)
    return model


def with_lora(config: LanguageModelConfig) -> tuple[PeftModel, dict[str, Any]]:
    """`initial_model`, frozen, with a fresh LoRA on all linears of its layers; and what identifies its weights."""
    numbers = torch.bfloat16 if config.bf16 else torch.float32  # frozen weights need no copy in float32
    model = load_weights(str(config.initial_model), numbers)
    base = describe_base(model, str(config.initial_model))
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = cast(PeftModel, get_peft_model(model, lora))
    if config.initial_lora is not None:
        weights = load_file(Path(config.initial_lora) / "adapter_model.safetensors")
        loaded: Any = set_peft_model_state_dict(adapted, weights)
        if unfit := loaded.unexpected_keys:
            raise ValueError(f"initial_lora {config.initial_lora} has weights for {unfit[0]}, which has no LoRA here")
    return adapted, base


def save_half(model: PreTrainedModel, folder: Path) -> None:
    """Save bfloat16 weights (half the bytes to ship) under a configuration that loads them as float32."""
    model.bfloat16().save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)


def start_from(
    model: PreTrainedModel, name: str, layers: list[int] | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Copy embedding, norm, head and the chosen `layers` of the model called `name` into `model` (in place).

    With another `tokenizer` than that model's, tokens of the same text keep their embedding, and the others begin at
    random.

    A shallow draft model that starts from layers of its target learns several times faster than from scratch. A layer
    that `layers` names again is a copy whose output matrices are zero: the deeper model starts as the one it grew from
    (LLaMA Pro, arXiv 2401.02415).

    Raises:
        ValueError: a layer that `name` does not have, or weights of another shape.
    """
    source = load_weights(name, torch.float32)
    chosen = list(range(len(source.model.layers))) if layers is None else layers
    if len(chosen) != len(model.model.layers) or not all(0 <= i < len(source.model.layers) for i in chosen):
        raise ValueError(
            f"initial_layers {chosen} do not fill {len(model.model.layers)} layers from the "
            f"{len(source.model.layers)} of {name}; name one layer for each"
        )
    source.model.layers = torch.nn.ModuleList(deepcopy(source.model.layers[i]) for i in chosen)
    for position, i in enumerate(chosen):
        if i in chosen[:position]:
            layer = source.model.layers[position]
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    if tokenizer is not None:
        _retokenize(source, load_tokenizer(name).get_vocab(), tokenizer.get_vocab())
    try:
        model.load_state_dict(source.state_dict())
    except RuntimeError as error:
        raise ValueError(
            f"the weights of {name} do not fit model_config: {str(error).splitlines()[-1].strip()}"
        ) from error


def _retokenize(model: Any, before: dict[str, int], after: dict[str, int]) -> None:
    """Give `model`, whose tokens are `before`, the tokens `after` (text to id), in place."""
    if before == after:
        return
    shared = [text for text in after if text in before]
    to, of = torch.tensor([after[text] for text in shared]), torch.tensor([before[text] for text in shared])
    old = {
        layer: layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    model.resize_token_embeddings(max(after.values()) + 1, mean_resizing=False)
    for layer, weight in zip((model.get_input_embeddings(), model.get_output_embeddings()), old.values(), strict=True):
        with torch.no_grad():
            layer.weight.normal_(std=float(weight.std()))
            layer.weight[to] = weight[of]
