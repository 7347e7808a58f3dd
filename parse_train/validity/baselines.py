"""Baselines of the trained head: zero-shot judge, the target's token probabilities, and the KL judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object
from torch import Tensor

from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.loading import LanguageModel
from parse_train.validity.collator import ValidityCollator
from parse_train.validity.data import ValidityDataset, ValidityExample
from parse_train.validity.kl_judge import KLJudge
from parse_train.validity.metrics import ScoredDrafts
from parse_train.validity.trainer import ValidityTrainer

ZERO_SHOT = "zero-shot judge"
LOG_PROBABILITY = "log-probability of the segment"
LOWEST_LOG_PROBABILITY = "lowest log-probability so far"

Rows = list[list[float]]  # scores of B drafts at their cuts


def baseline_scores(
    trainer: ValidityTrainer, lm: LanguageModel, dataset: ValidityDataset, kl_judge: KLJudge | None = None
) -> dict[str, ScoredDrafts]:
    """Score every draft of `dataset` with each baseline. Every process must call this function and gets the result.

    A segment's score is the target's mean log-probability of its tokens. The lowest score up to a segment is the score
    of the whole prefix.

    Args:
        kl_judge: None, or a judge that reads all drafts.
    """
    judge = ZeroShotJudge(lm.model, lm.tokenizer)
    model = trainer.model

    def score(examples: Sequence[ValidityExample], batch: dict[str, Tensor]) -> dict[str, Rows]:
        places = (batch["input_ids"], batch["visible"], batch["cuts"])
        asked = model.judge(*places, judge.probe, judge.head).sigmoid()
        hidden = model.context_hidden(batch["input_ids"])
        segments = segment_log_probability(hidden, *places, lm.decoder.logits)
        scores = {ZERO_SHOT: asked, LOG_PROBABILITY: segments, LOWEST_LOG_PROBABILITY: segments.cummin(1).values}
        found = {name: _without_padding(values, examples) for name, values in scores.items()}
        if kl_judge is not None:
            for example, states in zip(examples, hidden, strict=True):
                before = states[len(example.context_ids) - 1 : example.length - 1]
                for name, row in kl_judge.score(example, before).items():
                    found.setdefault(name, []).append(row)
        return found

    return _score(trainer, dataset, score)


@torch.no_grad()
def segment_log_probability(
    hidden: Tensor, input_ids: Tensor, visible: Tensor, cuts: Tensor, logits: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mean log-probability of each segment's tokens, [B, K]; 0 in padding.

    Args:
        hidden: [B, T, H], the states that predict the next tokens.
        input_ids: [B, T]; visible, cuts: [B, K], see `ValidityCollator`.
        logits: from [n, H] to [n, V].
    """
    scores = torch.zeros(visible.shape)
    for row in range(len(input_ids)):  # row by row: a whole batch of logits may not fit in memory
        ends = visible[row][visible[row] > 0]
        start, stop = int(ends[0] - cuts[row, 0]), int(ends[-1])
        predicted = logits(hidden[row, start - 1 : stop - 1]).float().log_softmax(-1)
        of_token = predicted.gather(1, input_ids[row, start:stop, None])[:, 0].double()
        total = torch.cat([of_token.new_zeros(1), of_token.cumsum(0)])[ends - start]
        length = torch.diff(ends, prepend=ends.new_tensor([start]))
        scores[row, : len(ends)] = (torch.diff(total, prepend=total.new_zeros(1)) / length).float().cpu()
    return scores


def _without_padding(scores: Tensor, examples: Sequence[ValidityExample]) -> Rows:
    return [row[: len(e.cuts)] for row, e in zip(scores.float().cpu().tolist(), examples, strict=True)]


def _score(
    trainer: ValidityTrainer,
    dataset: ValidityDataset,
    scorer: Callable[[Sequence[ValidityExample], dict[str, Tensor]], dict[str, Rows]],
) -> dict[str, ScoredDrafts]:
    """Apply `scorer` to all drafts, divided among the processes."""
    rank, world = trainer.args.process_index, trainer.args.world_size
    size, collate = trainer.args.per_device_eval_batch_size, ValidityCollator()
    trainer.model.eval()
    mine = range(rank, len(dataset), world)
    found: list[tuple[str, int, list[float]]] = []
    for begin in range(0, len(mine), size):
        indices = mine[begin : begin + size]
        examples = [dataset[i] for i in indices]
        batch = {key: value.to(trainer.args.device) for key, value in collate(examples).items()}
        with trainer.compute_loss_context_manager():
            scores = scorer(examples, batch)
        found += [(name, i, row) for name, rows in scores.items() for i, row in zip(indices, rows, strict=True)]
    rows_of: dict[str, dict[int, list[float]]] = {}
    for name, i, row in gather_object(found):
        rows_of.setdefault(name, {})[i] = row
    return {name: _assemble(rows, dataset.examples) for name, rows in rows_of.items()}


def _assemble(scores: dict[int, list[float]], examples: list[ValidityExample]) -> ScoredDrafts:
    return ScoredDrafts.from_rows(
        [scores[i] for i in range(len(examples))], [e.labels for e in examples], [e.cuts for e in examples]
    )
