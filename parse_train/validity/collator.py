"""Batches for validity training: prompts with drafts, padded on the right, and the visible length of each probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parse_train.training_config import IGNORED
from parse_train.validity.data import ValidityExample


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
        size, longest, most = len(examples), max(e.length for e in examples), max(len(e.cuts) for e in examples)
        input_ids = torch.full((size, longest), self.pad_id)
        visible = torch.zeros(size, most, dtype=torch.long)
        cuts, labels = (torch.full((size, most), IGNORED) for _ in range(2))
        weights = torch.zeros(size, most)
        for i, example in enumerate(examples):
            k = len(example.cuts)
            input_ids[i, : example.length] = torch.tensor(example.context_ids + example.draft_ids)
            cuts[i, :k] = torch.tensor(example.cuts)
            visible[i, :k] = cuts[i, :k] + len(example.context_ids)
            labels[i, :k] = torch.tensor(example.labels, dtype=torch.long)
            weights[i, :k] = torch.tensor(example.weights)
        return {"input_ids": input_ids, "visible": visible, "cuts": cuts, "labels": labels, "weights": weights}
