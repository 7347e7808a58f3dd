"""Guesses for what the target writes behind an accepted cut: the rest of the draft that it has just read.

vLLM's speculative decoding takes a class of one's own (`{"method": "custom_class", "model": …}`), and shows it the
tokens of every request in the batch. Among them are those that ask for validities: their prompts hold a draft. When
a request follows whose whole prompt stands at the beginning of such a prompt, it goes on from a cut, and what was
rejected there says how the answer may be worded (`parse_infer.guesses.rejected_draft`). Nothing more has to be sent,
no model runs, and vLLM keeps a guess only where the target agrees.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parse_infer.guesses.rejected_draft import continuation
from parse_infer.vllm.options import SETTINGS

_SECONDS = 10.0  # after that nobody goes on from a draft any more
Ids = NDArray[np.int32]


@dataclass
class _Resumed:
    """A request that goes on from a cut of a draft; `size` tokens by now."""

    read: Ids
    cut: int
    size: int

    def is_in(self, row: Ids) -> bool:
        return len(row) >= self.size and np.array_equal(row[: self.cut], self.read[: self.cut])


class RejectedDrafts:
    """vLLM's proposer. Called once a step, after its tokens have been chosen."""

    def __init__(self, vllm_config: Any) -> None:
        self._n = vllm_config.speculative_config.num_speculative_tokens
        self._vocab_size = getattr(vllm_config.model_config.hf_config, SETTINGS)["vocab_size"]
        # Contexts with the longest known part of a draft behind them, and when that was read.
        self._read: deque[tuple[Ids, float]] = deque(maxlen=vllm_config.scheduler_config.max_num_seqs)
        self._resumed: list[_Resumed] = []

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Ids, token_ids_cpu: Ids, **_: Any
    ) -> list[list[int]]:
        """For each request in the batch what may follow; nothing is a guess too.

        Args:
            sampled_token_ids: what this step has added to each; nothing to a prompt that is not read to its end.
            num_tokens_no_spec, token_ids_cpu: each request's tokens, [n, longest], and how many they are.
        """
        rows = [token_ids_cpu[i, : num_tokens_no_spec[i]] for i in range(len(sampled_token_ids))]
        known, self._resumed = self._resumed, []
        guesses = []
        for row, new in zip(rows, sampled_token_ids, strict=True):
            guesses.append(self._guess(row, len(row) - len(new), known) if new else [])
        return guesses

    def _guess(self, row: Ids, before: int, known: list[_Resumed]) -> list[int]:
        """Behind `row`, of which this step has found what stands from `before` on."""
        probe = np.flatnonzero(row[:before] >= self._vocab_size)
        if len(probe):
            self._note(row[: probe[0]].copy())
            return []
        resumed = next((one for one in known if one.size == before and one.is_in(row)), None)
        if resumed is None:
            read = self._take(row[:before])
            if read is None:
                return []
            resumed = _Resumed(read, before, before)
        resumed.size = len(row)
        self._resumed.append(resumed)
        rest = resumed.read[resumed.cut - 1 :].tolist()  # the first pair may begin before the cut
        return continuation(rest, row[-2:].tolist(), len(row) - resumed.cut, self._n)

    def _note(self, text: Ids) -> None:
        """A draft was read up to a cut. Of several cuts the last one says most."""
        for i, (other, _) in enumerate(self._read):
            if _begins(text, other):
                return
            if _begins(other, text):
                del self._read[i]
                break
        self._read.append((text, time.monotonic()))

    def _take(self, prompt: Ids) -> Ids | None:
        """The draft in whose prompt all of this stands at the beginning. Only one request goes on from it."""
        while self._read and self._read[0][1] < time.monotonic() - _SECONDS:
            self._read.popleft()
        for i, (text, _) in enumerate(self._read):
            if _begins(prompt, text):
                del self._read[i]
                return text
        return None


def _begins(part: Ids, text: Ids) -> bool:
    return len(part) <= len(text) and np.array_equal(part, text[: len(part)])
