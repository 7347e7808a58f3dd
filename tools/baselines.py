"""Baselines of a trained head: zero-shot judge, the target's token probabilities, and the KL judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rich.progress import track
from torch import Tensor

from parse_infer.judge.verifier import Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.loading import LanguageModel
from parse_infer.text.cuts import Segmenter
from parse_train.judge.data import ValidityDataset
from parse_train.judge.metrics import ScoredDrafts
from tools.kl_judge import KLJudge

ZERO_SHOT = "zero-shot judge"
LOG_PROBABILITY = "log-probability of the segment"
LOWEST_LOG_PROBABILITY = "lowest log-probability so far"


def baseline_scores(
    lm: LanguageModel, dataset: ValidityDataset, kl_judge: KLJudge | None = None
) -> dict[str, ScoredDrafts]:
    """Score every draft of `dataset` with each baseline.

    A segment's score is the target's mean log-probability of its tokens. The lowest score up to a segment is the score
    of the whole prefix.

    Args:
        kl_judge: None, or a judge that reads all drafts.
    """
    verifier = Verifier(lm.decoder, ZeroShotJudge(lm.model, lm.tokenizer), Segmenter(lm.tokenizer))
    found: dict[str, list[list[float]]] = {}
    for example in track(dataset.examples, "baselines", transient=True):
        lm.decoder.seek(example.context_ids)
        verified = verifier.verify(example.draft_ids, example.cuts)
        before = verified.hidden[:-1]
        segments = segment_log_probability(before, example.draft_ids, example.cuts, lm.decoder.logits)
        rows = {
            ZERO_SHOT: verified.validity,
            LOG_PROBABILITY: segments.tolist(),
            LOWEST_LOG_PROBABILITY: segments.cummin(0).values.tolist(),
            **({} if kl_judge is None else kl_judge.score(example, before)),
        }
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    labels, cuts = [e.labels for e in dataset.examples], [e.cuts for e in dataset.examples]
    return {name: ScoredDrafts.from_rows(rows, labels, cuts) for name, rows in found.items()}


@torch.inference_mode()
def segment_log_probability(
    before: Tensor, draft_ids: Sequence[int], cuts: Sequence[int], logits: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mean log-probability of each segment's tokens, [K].

    Args:
        before: [T, H], the states that predict the T draft tokens.
        logits: from [T, H] to [T, V].
    """
    ids, ends = (torch.tensor(values, device=before.device) for values in (draft_ids, cuts))
    of_token = logits(before).float().log_softmax(-1).gather(-1, ids[:, None])[:, 0].double()
    total = torch.cat([of_token.new_zeros(1), of_token.cumsum(0)])[ends]
    length = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.diff(total, prepend=total.new_zeros(1)) / length
