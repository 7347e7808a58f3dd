"""transformers' Trainer for a validity head: loss, batches of similar length, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import EvalPrediction, Trainer

from parse_infer import tracking
from parse_train.judge.config import JudgeTrainingConfig
from parse_train.judge.data import ValidityDataset
from parse_train.judge.figures import acceptance_figure, png, reliability_diagram
from parse_train.judge.metrics import ScoredDrafts, headline_metrics
from parse_train.length_sampler import EpochLengthSampler
from parse_train.training_config import IGNORED

if TYPE_CHECKING:
    from parse_train.judge.logprob.model import LogprobModel
    from parse_train.judge.stream.model import StreamModel


OF_LOSS = ("labels", "targets", "weights", "problem")
"""Columns of a batch that the model does not read."""


def ranking_loss(logits: Tensor, right: Tensor, problem: Tensor) -> Tensor:
    """Return the mean of log(1 + exp(wrong - right)) over all pairs of a right and a wrong draft of one problem.

    Args:
        logits: float32 [B], of whole drafts.
        right: bool [B].
        problem: int64 [B].
    """
    pairs = (problem[:, None] == problem) & right[:, None] & ~right
    return softplus(logits - logits[:, None])[pairs].sum() / pairs.sum().clamp_min(1)


class ProblemSampler(Sampler[int]):
    """Random order of problems, each with all its drafts; a function of seed and epoch alone."""

    def __init__(self, problems: Sequence[str], seed: int, epoch: Callable[[], int]) -> None:
        self.seed, self.epoch = seed, epoch
        of: dict[str, list[int]] = {}
        for i, problem in enumerate(problems):
            of.setdefault(problem, []).append(i)
        self.groups = list(of.values())

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch())
        for i in torch.randperm(len(self.groups), generator=generator).tolist():
            yield from self.groups[i]


class ValidityTrainer(Trainer):
    """Trainer with binary cross-entropy over all cuts of all drafts in an optimiser step.

    `metrics.headline_metrics` computes evaluation figures from logits, labels and cuts. Checkpoints have transformers'
    format (adapter and head in model.safetensors).
    """

    args: JudgeTrainingConfig
    model: LogprobModel | StreamModel

    def __init__(
        self,
        model: LogprobModel | StreamModel,
        args: JudgeTrainingConfig,
        train_dataset: ValidityDataset,
        eval_dataset: ValidityDataset,
        data_collator: Callable[[list[Any]], dict[str, Tensor]],
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._metrics,
            data_collator=data_collator,
        )
        self.last_evaluation: ScoredDrafts | None = None

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if getattr(self.args, "ranking", 0):
            return ProblemSampler([example.problem for example in dataset.examples], self.args.seed, self._epoch)
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        return EpochLengthSampler.of(self, dataset.lengths)

    def _epoch(self) -> int:
        return int(self.state.epoch or 0)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        return SequentialSampler(eval_dataset)  # sorted by length already

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean cross-entropy per cut, weighted by confidence.

        `num_items_in_batch` is the number of cuts in the optimiser step."""
        outputs = model(**{name: value for name, value in inputs.items() if name not in OF_LOSS})
        labels, logits = inputs["labels"], outputs["logits"].float()
        real = labels != IGNORED
        weight = inputs["weights"].float()  # 0 in padding
        loss = binary_cross_entropy_with_logits(logits, inputs["targets"].float(), weight, reduction="sum")
        if num_items_in_batch is None:
            loss = loss / real.sum()
        else:
            loss = loss / num_items_in_batch
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        if ranking := getattr(self.args, "ranking", 0.0):
            steps = 1 if num_items_in_batch is None else self.args.gradient_accumulation_steps
            last = real.sum(-1, keepdim=True) - 1
            right = labels.gather(-1, last)[:, 0] == 1
            loss = loss + ranking / steps * ranking_loss(logits.gather(-1, last)[:, 0], right, inputs["problem"])
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if tracking.runs() and self.last_evaluation is not None:
            figures = {
                "eval/reliability": reliability_diagram(self.last_evaluation),
                "eval/acceptance": acceptance_figure({"trained": self.last_evaluation}, self.args.risk_alpha),
            }
            tracking.log_images({name: png(figure) for name, figure in figures.items()}, self.state.global_step)
        return metrics

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        self.last_evaluation = ScoredDrafts.from_prediction(prediction.predictions, prediction.label_ids)
        return headline_metrics(self.last_evaluation, alpha=self.args.risk_alpha)

    def score(self, dataset: ValidityDataset) -> ScoredDrafts:
        """Score every draft of `dataset`, in order. Every process must call this method and gets the result.

        Unlike `predict` it logs nothing, so the figures of one evaluation have one name in the tracker."""
        loader = self.get_test_dataloader(dataset)
        prediction = self.evaluation_loop(loader, description="Scoring", prediction_loss_only=False)
        return ScoredDrafts.from_prediction(prediction.predictions, prediction.label_ids)
