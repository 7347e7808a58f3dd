"""transformers' Trainer for a validity head: loss, batches of similar length, and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
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
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return EpochLengthSampler.of(self, dataset.lengths)

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
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", "weights")})
        labels = inputs["labels"]
        real = labels != IGNORED
        valid = labels == 1
        weight = inputs["weights"].float()  # 0 in padding
        loss = binary_cross_entropy_with_logits(outputs["logits"].float(), valid.float(), weight, reduction="sum")
        if num_items_in_batch is None:
            loss = loss / real.sum()
        else:
            loss = loss / num_items_in_batch
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
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
