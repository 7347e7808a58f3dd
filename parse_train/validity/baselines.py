"""What the trained head is compared with: the zero-shot judge, and the target's own token probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from parse_infer.models.loading import LanguageModel
from parse_infer.verify.zero_shot_judge import ZeroShotJudge
from parse_train.validity.collator import ValidityCollator
from parse_train.validity.data import ValidityDataset, ValidityExample
from parse_train.validity.metrics import ScoredDrafts
from parse_train.validity.trainer import ValidityTrainer

ZERO_SHOT = "zero-shot judge"
LOG_PROBABILITY = "log-probability of the segment"
LOWEST_LOG_PROBABILITY = "lowest log-probability so far"

Scorer = Callable[[dict[str, Tensor]], Tensor]  # a batch -> scores [B, K]


def baseline_scores(trainer: ValidityTrainer, lm: LanguageModel, dataset: ValidityDataset) -> dict[str, ScoredDrafts]:
    """Scores of every draft of `dataset` by each baseline. Every process must call it; all get the result.

    A segment's score is the target's mean log-probability of its tokens; the lowest of the segments so far is the
    same as a score of the whole prefix.
    """
    judge = ZeroShotJudge(lm.model, lm.tokenizer)
    model = trainer.model

    def zero_shot(batch: dict[str, Tensor]) -> Tensor:
        places = (batch["input_ids"], batch["visible"], batch["cuts"])
        return model.judge(*places, judge.probe, judge.head).sigmoid()

    def log_probability(batch: dict[str, Tensor]) -> Tensor:
        hidden = model.context_hidden(batch["input_ids"])
        return segment_log_probability(hidden, batch["input_ids"], batch["visible"], batch["cuts"], lm.decoder.logits)

    segments = _score(trainer, dataset, log_probability)
    lowest = ScoredDrafts(np.minimum.accumulate(segments.scores, axis=1), segments.labels, segments.cuts)
    return {
        ZERO_SHOT: _score(trainer, dataset, zero_shot),
        LOG_PROBABILITY: segments,
        LOWEST_LOG_PROBABILITY: lowest,
    }


@torch.no_grad()
def segment_log_probability(
    hidden: Tensor, input_ids: Tensor, visible: Tensor, cuts: Tensor, logits: Callable[[Tensor], Tensor]
) -> Tensor:
    """Mean log-probability of each segment's tokens, [B, K]; 0 in padding.

    Args:
        hidden: [B, T, H], the state that predicts the next token.
        input_ids: [B, T]; visible, cuts: [B, K], see `ValidityCollator`.
        logits: from [n, H] to [n, V].
    """
    scores = torch.zeros(visible.shape)
    for row in range(len(input_ids)):  # one row at a time: a whole batch of logits would not fit for real vocabularies
        ends = visible[row][visible[row] > 0]
        start, stop = int(ends[0] - cuts[row, 0]), int(ends[-1])
        predicted = logits(hidden[row, start - 1 : stop - 1]).float().log_softmax(-1)
        of_token = predicted.gather(1, input_ids[row, start:stop, None])[:, 0].double()
        total = torch.cat([of_token.new_zeros(1), of_token.cumsum(0)])[ends - start]
        length = torch.diff(ends, prepend=ends.new_tensor([start]))
        scores[row, : len(ends)] = (torch.diff(total, prepend=total.new_zeros(1)) / length).float().cpu()
    return scores


def _score(trainer: ValidityTrainer, dataset: ValidityDataset, scorer: Scorer) -> ScoredDrafts:
    """Apply `scorer` to all drafts, shared among the processes."""
    rank, world = trainer.args.process_index, trainer.args.world_size
    size, collate = trainer.args.per_device_eval_batch_size, ValidityCollator()
    trainer.model.eval()
    mine = range(rank, len(dataset), world)
    found: list[tuple[int, list[float]]] = []
    for begin in range(0, len(mine), size):
        indices = mine[begin : begin + size]
        examples = [dataset[i] for i in indices]
        batch = {key: value.to(trainer.args.device) for key, value in collate(examples).items()}
        with trainer.compute_loss_context_manager():
            rows = scorer(batch).float().cpu().tolist()
        found += [(i, row[: len(e.cuts)]) for i, e, row in zip(indices, examples, rows, strict=True)]
    return _assemble(dict(gather_object(found)), dataset.examples)


def _assemble(scores: dict[int, list[float]], examples: list[ValidityExample]) -> ScoredDrafts:
    return ScoredDrafts.from_rows(
        [scores[i] for i in range(len(examples))], [e.labels for e in examples], [e.cuts for e in examples]
    )
