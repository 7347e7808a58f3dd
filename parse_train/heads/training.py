"""Configuration, loss, metrics and run that all trainings of token-level speculation heads share.

First the model answers the task's prompts; an interrupted run resumes. Then the head learns the model's distribution
on these answers. Each training step computes the head's inputs with a forward of the frozen model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import EvalPrediction, Trainer, set_seed

from parse_infer import tracking
from parse_infer.errors import ParseError
from parse_infer.models.architecture import embedding_weight
from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.token_drafters.eagle_head import EagleHead
from parse_infer.token_drafters.medusa import MedusaHead
from parse_train import checkpoints, training_run
from parse_train.length_sampler import EpochLengthSampler
from parse_train.muon import MuonWithAdamW
from parse_train.self_generated_data import (
    SelfGeneratedConfig,
    check_at_least_one,
    check_held_out,
    collate,
    commonest_tokens,
    own_answers,
)
from parse_train.training_config import IGNORED


@dataclass
class HeadTrainingConfig(SelfGeneratedConfig):
    """Fields of every kind of head, on top of transformers' `TrainingArguments`."""

    steps: int = field(default=5, metadata={"help": "Speculative tokens that the head learns to propose."})
    step_decay: float = field(default=0.9, metadata={"help": "Loss weight of a step, relative to the previous step."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Size of the head's vocabulary: the most frequent tokens; default: all."}
    )
    muon: bool = field(default=False, metadata={"help": "Muon for the layers' matrices, AdamW for all else."})
    head_dtype: str = field(default="auto", metadata={"help": "Dtype of the saved head: auto (as trained), bfloat16."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "steps")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ParseError(f"draft_vocab_size is {self.draft_vocab_size}; it must be at least 1")
        if self.muon and getattr(self, "deepspeed_plugin", None) is not None:
            raise ParseError("muon needs whole matrices, which DeepSpeed does not provide: set muon to false (AdamW)")
        if self.activation_checkpointing:
            raise ParseError(
                "activation_checkpointing is set, but the model runs without gradient, and only the head keeps "
                "activations: leave it out, and lower per_device_train_batch_size to save memory"
            )
        check_head_share("step_decay", self.step_decay)
        if self.head_dtype not in ("auto", "bfloat16"):
            raise ParseError(f"head_dtype is {self.head_dtype!r}; it must be auto or bfloat16")


def check_head_share(key: str, value: float) -> None:
    """Raise ValueError unless 0 < value <= 1."""
    if not 0 < value <= 1:
        raise ParseError(f"{key} is {value}; it must be above 0 and at most 1")


class HeadModel(nn.Module, ABC):
    """A frozen model and the head that learns to propose its tokens. The state dict holds the head only.

    Args:
        head: has `token_ids` (the model's token for each token of the head), `set_vocabulary`, `output_weights` and
            `save_pretrained`.
        steps: number of speculative tokens.
        step_decay: loss weight of a step, relative to the previous step.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over all tokens of an optimiser step

    def __init__(self, lm: LanguageModel, head: EagleHead | MedusaHead, steps: int, step_decay: float) -> None:
        super().__init__()
        self.head = head
        self.steps, self.step_decay = steps, step_decay
        self._frozen = [lm]  # in a list: not a submodule

    @abstractmethod
    def propose(self, states: Sequence[Tensor], embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each step k, logits [B, n, V'] and anchors [n].

        An anchor i is the last token with a known state; from there the head proposes token i + 2 + k.

        Args:
            states: [B, T, H] each, the hidden states of every layer (0: the embeddings; last: the final norm).
            embeddings: [B, T, H], the token embeddings, in the head's dtype.
        """

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the loss, and whether each proposed token is the model's greedy choice.

        Returns:
            {"loss": scalar, "right": int64 [B, T, steps]: 1 or 0, -100 at positions that do not count}.
        """
        with torch.no_grad():
            model = self._frozen[0].model
            output = model(input_ids=input_ids, output_hidden_states=True, use_cache=False)
            embeddings = nn.functional.embedding(input_ids, embedding_weight(model))
            embeddings = embeddings.to(self.head.output_weights[0].dtype)
            token_ids = self.head.token_ids
            target_logits = output.logits[..., token_ids].float()
            own = output.logits.argmax(-1)
        loss, total = embeddings.new_zeros((), dtype=torch.float32), 0.0
        right = torch.full((*input_ids.shape, self.steps), IGNORED, device=input_ids.device)
        last = input_ids.shape[1] - 2  # no label exists for the prediction after the last token
        for step, (logits, anchors) in enumerate(self.propose(output.hidden_states, embeddings)):
            places = anchors + 1 + step  # positions where the model predicts the proposed token
            counted = (labels[:, (places + 1).clamp_max(last + 1)] != IGNORED) & (places <= last)
            places = places.clamp_max(last)
            each = -(target_logits[:, places].softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
            if counted.any():
                weight = self.step_decay**step
                loss, total = loss + weight * each[counted].mean(), total + weight
            hit = token_ids[logits.argmax(-1)] == own[:, places]
            right[:, anchors, step] = torch.where(counted, hit.long(), IGNORED)
        return {"loss": loss / max(total, 1e-9), "right": right}


class HeadTrainer(Trainer):
    """transformers' Trainer for a head; evaluation reports accuracy per step and the simulated acceptance length."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        args = cast(HeadTrainingConfig, self.args)
        if not args.muon:
            return super().create_optimizer()
        if self.optimizer is None:
            head = cast(HeadModel, self.model).head
            self.optimizer = MuonWithAdamW(head, head.output_weights, args.learning_rate, args.weight_decay)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        return EpochLengthSampler.of(self, [len(ids) for ids in rows["input_ids"]])

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss per token. `num_items_in_batch` is the number of labelled tokens of the optimiser
        step, in which a part with longer answers counts more."""
        output = model(inputs["input_ids"], inputs["labels"])
        loss = output["loss"]
        if num_items_in_batch is not None:
            loss = loss * (inputs["labels"] != IGNORED).sum() / num_items_in_batch
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, {"right": output["right"]}) if return_outputs else loss


def head_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return accuracy_1, accuracy_2, …: the share of proposed tokens at each step that are the model's greedy choice.

    acceptance_length: tokens per forward of the model with these proposals, including the model's own token.
    """
    right = np.asarray(prediction.predictions).reshape(-1, np.asarray(prediction.predictions).shape[-1])
    metrics = {}
    for step in range(right.shape[1]):
        seen = right[:, step] != IGNORED
        metrics[f"accuracy_{step + 1}"] = float((right[seen, step] == 1).mean()) if seen.any() else 0.0
    whole = (right != IGNORED).all(axis=1)
    lengths = np.cumprod(right[whole] == 1, axis=1).sum(axis=1)
    metrics["acceptance_length"] = 1 + float(lengths.mean()) if len(lengths) else 1.0
    return metrics


def train_head(config: HeadTrainingConfig, make: Callable[[LanguageModel], HeadModel]) -> None:
    """Let the model answer the prompts, train the head returned by `make`, and write it to `output_dir`/head.

    Raises ValueError for a head that does not fit the model, before the model answers.
    """
    set_seed(config.seed)
    check_held_out(config)
    lm = load_language_model(
        config.model,
        role="target",
        device=config.device,
        dtype=config.model_dtype,
        template_options=config.template_options,
        trainable=True,
    )
    lm.model.requires_grad_(False)
    model = make(lm)
    folder = Path(str(config.output_dir))
    answers, train, evaluation = own_answers(lm, config)
    start_from_output(model.head, lm, commonest_tokens(train, model.head.config.vocab_size, len(model.head.token_ids)))
    model.head.to(lm.model.device)
    start = checkpoints.prepare(config, len(train), checkpoints.data_digest([fingerprint(lm.model), *train]))
    models = (config.model,)
    training_run.start(config, models, resumed=start.checkpoint is not None)
    training_run.log_artifact(config, models, "dataset", "answers", answers, used=True)
    trainer = HeadTrainer(
        model,
        config,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=head_metrics,
    )
    checkpoints.train(trainer, start)
    metrics = trainer.evaluate()
    if config.process_index == 0:
        head = model.head.bfloat16() if config.head_dtype == "bfloat16" else model.head
        head.save_pretrained(folder / "head")
        print(", ".join(f"{k.removeprefix('eval_')} {v:.3f}" for k, v in metrics.items() if "acc" in k))
        print(f"head written to {folder / 'head'}")
        training_run.log_artifact(config, models, "model", f"{config.kind}-head", folder / "head")
        tracking.finish()


@torch.no_grad()
def start_from_output(head: EagleHead | MedusaHead, lm: LanguageModel, tokens: Sequence[int]) -> None:
    """Set the vocabulary of a new head to `tokens` (ascending), with the model's output weights."""
    head.set_vocabulary(tokens)
    for weight in head.output_weights:
        weight.copy_(lm.model.get_output_embeddings().weight[list(tokens)].float().cpu())
