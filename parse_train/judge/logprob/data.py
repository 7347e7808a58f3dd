"""Labelled drafts with the target's log-probabilities, and their batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_tools.labels.logprobs import ReadDraft, read_drafts
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.text.prompts import Prompt
from parse_train.judge.data import ValidityDataset, split_by_problem
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.training_config import IGNORED


@dataclass(frozen=True)
class LogprobExample:
    """One labelled draft.

    `cuts` are token offsets in the draft; `weights` are loss weights from 0 to 1.
    `problem` identifies the problem.
    """

    logprobs: TokenLogprobs
    cuts: list[int]
    labels: list[bool]
    weights: list[float]
    temperature: float | None
    prompt: Prompt
    problem: str
    domain: str | None

    @property
    def length(self) -> int:
        return len(self.logprobs.ids)

    @property
    def draft_ids(self) -> list[int]:
        return self.logprobs.ids.tolist()

    @classmethod
    def of(cls, draft: ReadDraft, k: int) -> LogprobExample:
        row, stored = draft.row, draft.logprobs
        logprobs = TokenLogprobs(stored.ids, stored.own, stored.top_ids[:, :1].clone(), stored.top[:, :k].clone())
        # An error costs what the target would have got right: nothing, where it fails alone.
        cost = 1.0 if row.target_value is None else row.target_value
        weights = [
            (2 * share - 1) * (1.0 if label else cost) for share, label in zip(row.confidence, row.labels, strict=True)
        ]
        return cls(logprobs, row.cuts, row.labels, weights, row.temperature, row.prompt, row.problem, row.domain)


def load_datasets(
    config: LogprobTrainingConfig, k: int, learnt: Collection[str] = ()
) -> tuple[ValidityDataset, ValidityDataset, dict[str, int]]:
    """Load training drafts, evaluation drafts (longest first) and counts for the log.

    Drafts of `more_data` are never held out: the exported bound is one for drafts like those of `data`. All training
    drafts of a problem weigh as much as those of another: a problem whose drafts differ has more of them.

    Args:
        learnt: `prompt_hash` of problems that the head has learnt from before; their drafts are not held out.

    Raises:
        ValueError, FileNotFoundError: see `read_drafts`; or all drafts are longer than `max_length`, or too few are
            wrong.
    """
    drafts = {id(draft.row): draft for draft in read_drafts(config.data)}
    rows = [draft.row for draft in drafts.values()]
    if config.eval_data is None:
        rows, eval_rows = split_by_problem(rows, config.eval_share, config.seed)
    else:
        held_out_drafts = {id(draft.row): draft for draft in read_drafts(config.eval_data)}
        drafts |= held_out_drafts
        eval_rows = [draft.row for draft in held_out_drafts.values()]
    more = {id(draft.row): draft for data in config.more_data for draft in read_drafts(data)}
    drafts |= more
    held_out = {row.prompt_key for row in eval_rows}
    train_rows = [row for row in (*rows, *(draft.row for draft in more.values())) if row.prompt_key not in held_out]
    if learnt:
        known, before = set(learnt), len(eval_rows)
        eval_rows = [row for row in eval_rows if prompt_hash(row.prompt) not in known]
        if len(eval_rows) < before and config.process_index == 0:
            print(f"note: start_from has learnt the problems of {before - len(eval_rows)} held-out drafts: left out")
    train, evaluation = (
        [LogprobExample.of(drafts[id(row)], k) for row in some if len(row.draft_ids) <= config.max_length]
        for some in (train_rows, eval_rows)
    )
    for name, examples in (("for training", train), ("for evaluation", evaluation)):
        if not examples:
            raise ParseError(f"{config.data} leaves no draft {name} of at most max_length {config.max_length} tokens")
    if (wrong := sum(not all(example.labels) for example in train)) < config.min_wrong_drafts:
        raise ParseError(
            f"{config.data} leaves {wrong} wrong drafts of {len(train)} for training, fewer than min_wrong_drafts "
            f"{config.min_wrong_drafts}: build more problems"
        )
    n_of = Counter(example.problem for example in train)
    mean = len(train) / len(n_of)
    train = [replace(e, weights=[weight * mean / n_of[e.problem] for weight in e.weights]) for e in train]
    counts = {
        "train_drafts": len(train),
        "train_problems": len({row.problem for row in train_rows}),
        "eval_drafts": len(evaluation),
        "eval_problems": len({row.problem for row in eval_rows}),
        "left_out": len(train_rows) + len(eval_rows) - len(train) - len(evaluation),
    }
    evaluation.sort(key=lambda example: -example.length)  # little padding, and the largest batch first
    return ValidityDataset(train), ValidityDataset(evaluation), counts


class LogprobCollator:
    """Collates B examples; T is the length of the longest draft, K the largest number of cuts.

    own, top, ids, first, cuts: as `LogprobModel.forward` takes them
    labels   int64 [B, K]      1 valid, 0 invalid, -100 padding
    weights  float32 [B, K]    weight of each label in the loss, 0 for padding
    """

    def __call__(self, examples: Sequence[LogprobExample]) -> dict[str, Tensor]:
        size, longest, max_cuts = len(examples), max(e.length for e in examples), max(len(e.cuts) for e in examples)
        own, top = torch.zeros(size, longest), torch.zeros(size, longest, examples[0].logprobs.top.shape[-1])
        ids, first = (torch.zeros(size, longest, dtype=torch.long) for _ in range(2))
        cuts, labels = (torch.full((size, max_cuts), IGNORED) for _ in range(2))
        weights = torch.zeros(size, max_cuts)
        for i, example in enumerate(examples):
            n, k, read = example.length, len(example.cuts), example.logprobs
            own[i, :n], top[i, :n], ids[i, :n], first[i, :n] = read.own, read.top, read.ids, read.top_ids[:, 0]
            cuts[i, :k], weights[i, :k] = torch.tensor(example.cuts), torch.tensor(example.weights)
            labels[i, :k] = torch.tensor(example.labels, dtype=torch.long)
        arrays = {"own": own, "top": top, "ids": ids, "first": first, "cuts": cuts}
        return arrays | {"labels": labels, "weights": weights}
