"""Train the small language models that ship with the package (`recipes/zoo/*.yaml`).

Sequence packing: samples are concatenated into rows of fixed length, and each sample attends only to itself. A sample
is a worked solution of a task or an answer of another model. The loss counts answer tokens only, because questions are
mostly random names and numbers. Solutions of the task are streamed, not stored.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, save_as_lora
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer

from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError
from parse_infer.files import replacing_folder
from parse_infer.models.loading import load_language_model, load_tokenizer
from parse_infer.models.lora import write_base
from parse_infer.models.token_map import token_map
from parse_train import checkpoints
from parse_train.muon import MuonWithAdamW
from parse_train.self_generated_data import AnswerConfig, read_answers, write_answers
from parse_train.training_config import IGNORED
from parse_zoo.train.language_model_config import LanguageModelConfig
from parse_zoo.train.packed_samples import PackedSamples, collate
from parse_zoo.train.starting_weights import all_weights, with_lora


class LanguageModelTrainer(Trainer):
    """Trainer with Muon (AdamW for a LoRA), a compiled backbone and logits at answer tokens only.

    Args:
        loss_tokens: LongTensor [n], ids that compete in the loss in addition to the tokens of the batch; None: all.
    """

    def __init__(self, *, loss_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model_accepts_loss_kwargs = False  # average the losses of accumulated batches
        self.loss_tokens = loss_tokens

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
            if self.loss_tokens is None:
                logits, wanted = core.lm_head(hidden[kept]), labels[kept]
            else:
                competing = torch.cat([self.loss_tokens, labels[kept]]).unique()
                logits = torch.nn.functional.linear(hidden[kept], core.lm_head.weight[competing])
                wanted = torch.searchsorted(competing, labels[kept])
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        return (loss, None) if return_outputs else loss


def main(config: LanguageModelConfig) -> None:
    """Train from scratch or resume from a checkpoint, and save model and tokenizer in `output_dir`/final."""
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
        loss_tokens=loss_tokens(config, tokenizer),
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
                save_lora(model, config, final)
                write_base(final, base)
            else:
                save_half(model, final)
            tokenizer.save_pretrained(final)


def loss_tokens(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor | None:
    """Return the tokens of `loss_tokenizer` as ids of `tokenizer`; None without a `loss_tokenizer`."""
    if config.loss_tokenizer is None:
        return None
    tokens = token_map(load_tokenizer(config.loss_tokenizer), tokenizer)
    if tokens is None:
        raise ParseError(
            f"loss_tokenizer {config.loss_tokenizer} has tokens that {config.tokenizer} does not have; build it with "
            f"the recipe tokenizer and base_tokenizer {config.tokenizer}"
        )
    return torch.tensor(list(tokens.target_ids))


def save_lora(model: PeftModel, config: LanguageModelConfig, folder: Path) -> None:
    """Save the LoRA in bfloat16, with ranks reduced to `lora_energy`."""
    model.peft_config["default"].base_model_name_or_path = config.initial_model
    if config.lora_energy == 1:
        # The embedding is not adapted; by default, peft queries the Hub whether the embedding was resized.
        model.bfloat16().save_pretrained(str(folder), save_embedding_layers=False)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting a PEFT adapter")  # peft warns that this is already a LoRA
        save_as_lora(folder, model.bfloat16(), rank=config.lora_energy, progressbar=True)


def save_half(model: PreTrainedModel, folder: Path) -> None:
    """Save bfloat16 weights, half the bytes, with a configuration that loads them as float32."""
    model.bfloat16().save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)


def right_answers(config: LanguageModelConfig) -> list[tuple[Problem, str]]:
    """Return the right answers of `answers_of` to the first training problems; stores them in `output_dir`/answers."""
    if config.answers_of is None:
        return []
    numbers = torch.bfloat16 if config.bf16 else "auto"
    lm = load_language_model(config.answers_of, role="target", device=config.device, dtype=numbers)
    wanted = AnswerConfig(
        model=config.answers_of,
        task=config.task,
        task_options=config.task_options,
        answer_temperature=config.answer_temperature,
        max_answer_tokens=config.row_length,  # a longer answer would not fit in a row
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
