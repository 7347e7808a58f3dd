"""Align a draft model with its target: `accelerate launch recipes/qwen-coder/draft.yaml`.

The target answers the task's prompts, and a LoRA on the draft model learns these answers (sequence-level distillation,
Kim and Rush 2016, arXiv 1606.07947). The LoRA is merged, so the result is a plain model for `--draft`. Its folder
lists the training prompts, which builds leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import torch
from huggingface_hub import ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import EvalPrediction, Trainer, set_seed

from parse_infer import __version__, tracking
from parse_infer.errors import ParseError
from parse_infer.files import replacing_folder
from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import load_language_model, same_tokenizer
from parse_infer.models.names import hub_id
from parse_infer.models.train_problems import train_problems_of, write_train_problems
from parse_train import checkpoints, training_run
from parse_train.self_generated_data import (
    SelfGeneratedConfig,
    check_at_least_one,
    check_held_out,
    collate,
    own_answers,
)
from parse_train.training_config import IGNORED

_PUBLISHED, _TRAINED = "eval_published", "eval"


@dataclass
class DraftModelTrainingConfig(SelfGeneratedConfig):
    """Fields of the recipe; `model` is the target."""

    kind: ClassVar[str] = "draft_model"

    draft: str = field(default="", metadata={"help": "Draft model to align, with the target's tokens."})
    draft_dtype: str = field(
        default="auto", metadata={"help": "Dtype of the draft model: auto, float32, bfloat16 or float16."}
    )
    lora_rank: int = field(default=32, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=64, metadata={"help": "The LoRA update is scaled by lora_alpha / lora_rank."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Layers with LoRA: names, or all-linear."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.draft:
            raise ParseError("the recipe needs the key draft")
        check_at_least_one(self, "lora_rank", "lora_alpha")


def main(config: DraftModelTrainingConfig) -> None:
    """Align the draft model and write it to `output_dir`/draft.

    Raises ValueError for a draft model with other tokens than the target's or without the layers of
    `lora_target_modules`, before the target answers.
    """
    set_seed(config.seed)
    learnt = check_held_out(config) | train_problems_of(config.draft)
    draft = load_language_model(
        config.draft, role="draft", device=config.device, dtype=config.draft_dtype, trainable=True
    )
    weights, modules = fingerprint(draft.model), config.lora_target_modules
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if modules == ["all-linear"] else modules,
    )
    model = cast(PeftModel, get_peft_model(draft.model, lora))
    target = load_language_model(
        config.model,
        role="target",
        device=config.device,
        dtype=config.model_dtype,
        template_options=config.template_options,
    )
    if not same_tokenizer(draft.tokenizer, target.tokenizer):
        raise ParseError(
            f"{config.draft} has other tokens than {config.model}: choose a draft model with the same ones"
        )
    answers, train, evaluation = own_answers(target, config)
    del target  # the training needs its answers alone
    start = checkpoints.prepare(config, len(train), checkpoints.data_digest([weights, *train]))
    models = config.model, config.draft
    training_run.start(config, models, resumed=start.checkpoint is not None)
    folder = Path(str(config.output_dir))
    training_run.log_artifact(config, models, "dataset", "answers", answers, used=True)
    trainer = Trainer(
        model,
        config,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=agreement,
        preprocess_logits_for_metrics=right_tokens,
    )
    checkpoints.train(trainer, start)
    metrics = trainer.evaluate(metric_key_prefix=_TRAINED)
    with model.disable_adapter():
        metrics |= trainer.evaluate(metric_key_prefix=_PUBLISHED)
    if config.process_index == 0:
        merged = model.merge_and_unload()
        merged.config.use_cache = True  # the Trainer turned it off
        with replacing_folder(folder / "draft") as written:
            merged.save_pretrained(written)
            draft.tokenizer.save_pretrained(written)
            write_train_problems(written, learnt)
            (written / "README.md").write_text(model_card(config, metrics), encoding="utf-8")
        for name, what in {"agreement": "agrees with the target", "tokens_per_forward": "tokens per forward"}.items():
            before, after = (metrics[f"{prefix}_{name}"] for prefix in (_PUBLISHED, _TRAINED))
            print(f"{what}: {before:.3f} before, {after:.3f} now")
        print(f"draft model written to {folder / 'draft'}")
        training_run.log_artifact(config, models, "model", "draft", folder / "draft")
        tracking.finish()


def model_card(config: DraftModelTrainingConfig, metrics: Mapping[str, float]) -> str:
    """Render README.md of the aligned draft model as a model card of the Hub; its publisher adds `draft`'s licence.

    Args:
        metrics: of the validation answers, before and after the training.
    """
    front = ModelCardData(
        base_model=hub_id(config.draft),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["parse-engine", "speculative-decoding", "draft-model"],
    )
    names = {"agreement": "target's tokens that are the first choice", "tokens_per_forward": "tokens per forward"}
    rows = [f"| {names[n]} | {metrics[f'{_PUBLISHED}_{n}']:.3f} | {metrics[f'{_TRAINED}_{n}']:.3f} |" for n in names]
    draft, target = Path(config.draft).name, Path(config.model).name
    lines = [
        "---",
        front.to_yaml(),
        "---",
        f"# {draft}, a draft model for {target}",
        "",
        f"{draft} learnt {target}'s answers to up to {config.n_problems} problems of `{config.task}` "
        f"(a LoRA of rank {config.lora_rank}, merged; `recipe: draft_model` of parse-engine {__version__}).",
        "",
        "| on validation answers of the target | before | now |",
        "|---|---:|---:|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def right_tokens(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Return for each token of an answer whether it is the draft model's first choice: int64 [B, T − 1]; -100
    elsewhere.

    Args:
        logits: [B, T, V], or a tuple that begins with them.
        labels: [B, T], -100 outside the answer.
    """
    chosen = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1].argmax(-1)
    return torch.where(labels[:, 1:] == IGNORED, IGNORED, (chosen == labels[:, 1:]).long())


def agreement(prediction: EvalPrediction) -> dict[str, float]:
    """Return `agreement`, the share of the target's tokens that are the draft model's first choice, and
    `tokens_per_forward`: the target's tokens per forward with proposals that end at their first wrong token."""
    right = np.asarray(prediction.predictions)
    answers = [row[row != IGNORED] for row in right if (row != IGNORED).any()]
    n, wrong = sum(map(len, answers)), sum(int((answer == 0).sum()) for answer in answers)
    forwards = wrong + sum(int(answer[-1]) for answer in answers)  # a wrong token ends its forward, as an answer does
    return {"agreement": 1 - wrong / max(n, 1), "tokens_per_forward": n / max(forwards, 1)}
