"""Labelled drafts as token ids of the target, and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_tools.labels.rows import LabelledDraft, read_rows
from parse_infer.errors import ParseError
from parse_infer.text.detokenizer import encode_continuation
from parse_infer.text.prompts import Prompt, render_prompt
from parse_train.judge.data import ValidityDataset, split_by_problem
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.training_config import IGNORED


@dataclass(frozen=True)
class ValidityExample:
    """Token ids of one labelled draft.

    `cuts` are token offsets in the draft; `weights` are loss weights from 0 (random label) to 1 (certain label).
    `context_ids` encode `prompt`; `problem` identifies the problem."""

    context_ids: list[int]
    draft_ids: list[int]
    cuts: list[int]
    labels: list[bool]
    weights: list[float]
    temperature: float | None = None
    prompt: Prompt = ""
    problem: str = ""
    domain: str | None = None

    @property
    def length(self) -> int:
        return len(self.context_ids) + len(self.draft_ids)


@dataclass(frozen=True)
class ValidityCollator:
    """Collates B examples; T is the length of the longest example, K the largest number of cuts.

    input_ids  int64 [B, T]    prompt, draft, padding
    visible    int64 [B, K]    number of tokens before each probe; 0 for padding
    cuts       int64 [B, K]    number of draft tokens before each probe; -100 for padding
    labels     int64 [B, K]    1 valid, 0 invalid, -100 padding
    weights    float32 [B, K]  weight of each label in the loss, 0 for padding

    Padding is to the right of every visible token, so causal attention hides it without a mask.
    """

    pad_id: int = 0

    def __call__(self, examples: Sequence[ValidityExample]) -> dict[str, Tensor]:
        size, longest, max_cuts = len(examples), max(e.length for e in examples), max(len(e.cuts) for e in examples)
        input_ids = torch.full((size, longest), self.pad_id)
        visible = torch.zeros(size, max_cuts, dtype=torch.long)
        cuts, labels = (torch.full((size, max_cuts), IGNORED) for _ in range(2))
        weights = torch.zeros(size, max_cuts)
        for i, example in enumerate(examples):
            k = len(example.cuts)
            input_ids[i, : example.length] = torch.tensor(example.context_ids + example.draft_ids)
            cuts[i, :k] = torch.tensor(example.cuts)
            visible[i, :k] = cuts[i, :k] + len(example.context_ids)
            labels[i, :k] = torch.tensor(example.labels, dtype=torch.long)
            weights[i, :k] = torch.tensor(example.weights)
        return {"input_ids": input_ids, "visible": visible, "cuts": cuts, "labels": labels, "weights": weights}


class Encoder:
    """Converts checked rows to token ids of the target.

    Rows of a build contain token ids. Segments of other sets are tokenised one by one, so that each cut is exact:
    `separator` follows each segment without line break except the last; `end_token` ends a finished solution.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        separator: str = "\n",
        end_token: int | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.vocab_size, self.separator = tokenizer, vocab_size, separator
        self.end_token = end_token
        self.template_options = template_options
        self._contexts: dict[str, list[int]] = {}
        self._compared = self._equal = 0

    def __call__(self, row: LabelledDraft) -> ValidityExample | None:
        """Return the example, or None for a row without segments.

        Raises:
            ValueError: the token ids do not belong to the target.
        """
        if row.draft_ids is not None and row.cuts is not None:
            ids, cuts, kept = row.draft_ids, row.cuts, list(range(len(row.cuts)))
            self._check_tokens(row, ids)
        else:
            ids, cuts, kept = self._tokenise(row.completions, finished=bool(row.finished))
        if not cuts:
            return None
        labels = [row.labels[i] for i in kept]
        # A label that is right with probability c has, on average, 2c - 1 times the gradient of a certain label.
        weights = [2 * row.confidence[i] - 1 for i in kept]
        context = self._context(row)
        facts = (row.temperature, row.prompt, row.problem, row.domain)
        return ValidityExample(context, ids, cuts, labels, weights, *facts)

    def _check_tokens(self, row: LabelledDraft, ids: list[int]) -> None:
        """Raise ValueError for ids outside the target's vocabulary, or if the first rows do not decode to the text."""
        if ids and max(ids) >= self.vocab_size:
            raise ParseError(
                f"{row.where}: draft_ids has the token {max(ids)}, but the target's vocabulary has only "
                f"{self.vocab_size}; the data was built for another target"
            )
        if self._compared < 20:
            self._compared += 1
            text = "".join("".join(row.completions).split())
            spelt = (str(self.tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (True, False))
            self._equal += any("".join(s.split()) == text for s in spelt)
            # A few drafts are cut off inside a character and decode differently.
            if self._compared == 20 and self._equal < 10:
                raise ParseError(
                    f"{row.where}: in most rows so far, the target's tokenizer decodes draft_ids to another text than "
                    "completions; the data was built for another target"
                )

    def _tokenise(self, segments: Sequence[str], finished: bool) -> tuple[list[int], list[int], list[int]]:
        ids: list[int] = []
        cuts: list[int] = []
        kept: list[int] = []
        for i, segment in enumerate(segments):
            last = i + 1 == len(segments)
            text = segment if last or segment.endswith("\n") else segment + self.separator
            # Encode as a continuation, because a SentencePiece tokenizer begins a text with a space.
            ids += encode_continuation(self.tokenizer, segments[i - 1] if i else "", text)
            if last and finished and self.end_token is not None:
                ids.append(self.end_token)
            if len(ids) > (cuts[-1] if cuts else 0):  # an empty segment has no cut
                cuts.append(len(ids))
                kept.append(i)
        return ids, cuts, kept

    def _context(self, row: LabelledDraft) -> list[int]:
        key = row.prompt_key
        if key not in self._contexts:  # several drafts share a prompt
            try:
                self._contexts[key] = render_prompt(self.tokenizer, row.prompt, template_options=self.template_options)
            except ValueError as error:
                raise ParseError(f"{row.where}: {error}") from error
        return self._contexts[key]


def load_datasets(
    config: ValidityTrainingConfig, encoder: Encoder
) -> tuple[ValidityDataset, ValidityDataset, dict[str, int]]:
    """Load training drafts, evaluation drafts (longest first) and counts for the log.

    Raises:
        ValueError, FileNotFoundError: see `read_rows`; or all drafts are longer than `max_length`.
    """
    rows = list(read_rows(config.data, config.layout))
    if config.eval_data is None:
        train_rows, eval_rows = split_by_problem(rows, config.eval_share, config.seed)
    else:
        eval_rows = list(read_rows(config.eval_data, config.eval_layout or config.layout))
        held_out = {row.prompt_key for row in eval_rows}  # not by id, as files may reuse ids
        train_rows = [row for row in rows if row.prompt_key not in held_out]
    train, dropped = encode_rows(train_rows, encoder, config.max_length)
    evaluation, dropped_eval = encode_rows(eval_rows, encoder, config.max_length)
    for name, examples in (("for training", train), ("for evaluation", evaluation)):
        if not examples:
            raise ParseError(
                f"{config.data} leaves no draft {name}: {len(rows)} rows, {dropped + dropped_eval} of them empty or "
                f"longer than max_length {config.max_length}, {len(rows) - len(train_rows)} of problems held out"
            )
    counts = {
        "train_drafts": len(train),
        "train_problems": len({row.problem for row in train_rows}),
        "eval_drafts": len(evaluation),
        "eval_problems": len({row.problem for row in eval_rows}),
        "left_out": dropped + dropped_eval,
    }
    evaluation.sort(key=lambda example: -example.length)  # little padding, and the largest batch first
    return ValidityDataset(train), ValidityDataset(evaluation), counts


def encode_rows(rows: Sequence[LabelledDraft], encoder: Encoder, max_length: int) -> tuple[list[ValidityExample], int]:
    """Return the examples of at most `max_length` tokens, and the number of rows left out (too long or empty)."""
    encoded = [encoder(row) for row in rows]
    examples = [example for example in encoded if example is not None and example.length <= max_length]
    return examples, len(rows) - len(examples)
