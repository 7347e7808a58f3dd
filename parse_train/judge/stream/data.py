"""Labelled drafts with log-probabilities and their prompts, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from parse_train.judge.logprob.data import LogprobCollator, LogprobExample


class StreamCollator(LogprobCollator):
    """Collates B examples as `LogprobCollator` does, and adds their prompts, N tokens at most.

    context  int64 [B, N]   tokens of the prompt, padded on the right
    visible  int64 [B, 1]   number of them

    Args:
        render: maps a prompt to its token ids.
        pad_id: a token for padding, which no output depends on.
    """

    def __init__(self, render: Callable[..., list[int]], pad_id: int) -> None:
        self._render, self._pad_id = render, pad_id
        self._rendered = lru_cache(maxsize=4096)(self._render_text)

    def __call__(self, examples: Sequence[LogprobExample]) -> dict[str, Tensor]:
        prompts = [self.context(example) for example in examples]
        context = torch.full((len(prompts), max(map(len, prompts))), self._pad_id)
        for row, ids in zip(context, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        visible = torch.tensor([[len(ids)] for ids in prompts])
        return super().__call__(examples) | {"context": context, "visible": visible}

    def context(self, example: LogprobExample) -> list[int]:
        """Return the token ids of the prompt."""
        prompt = example.prompt
        return self._rendered(prompt) if isinstance(prompt, str) else self._render(prompt)

    def _render_text(self, prompt: str) -> list[int]:
        return self._render(prompt)
