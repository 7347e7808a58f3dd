"""Guesses for what the target writes behind an accepted cut: the rest of the draft that it has just read.

vLLM's speculative decoding takes a class of one's own (`{"method": "custom_class", "model": …}`), and shows it the
tokens of every request in the batch, without a name. Among them are those that ask for validities: their prompts hold
a draft. When a request begins whose whole prompt stands at the beginning of such a prompt, it goes on from a cut, and
what was rejected there says how the answer may be worded (`parse_infer.speculation.rejected_draft`). Nothing more
has to be sent, no model runs, and vLLM keeps a guess only where the target agrees.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from parse_infer.speculation.rejected_draft import Ids, continuation
from parse_infer.vllm_plugin.options import SETTINGS

_SECONDS = 10.0  # after that nobody goes on from a draft any more


@dataclass(frozen=True, eq=False)
class _Resumed:
    """A request that goes on from a cut of a draft; of its `size` tokens so far `last` is the last."""

    read: Ids
    cut: int
    size: int
    last: int


class RejectedDrafts:
    """vLLM's proposer. Called once a step, after its tokens have been chosen."""

    def __init__(self, vllm_config: Any) -> None:
        self._n = vllm_config.speculative_config.num_speculative_tokens
        self._vocab_size = getattr(vllm_config.model_config.hf_config, SETTINGS)["vocab_size"]
        # Contexts with the longest known part of a draft behind them, and when that was read; the oldest first.
        self._read: deque[tuple[Ids, float]] = deque(maxlen=vllm_config.scheduler_config.max_num_seqs)
        self._resumed: list[_Resumed] = []
        self._plain: set[tuple[int, int]] = set()  # size and last token of each other request

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
        resumed, plain = self._resumed, self._plain
        self._resumed, self._plain = [], set()
        guesses: list[list[int]] = []
        for i, new in enumerate(sampled_token_ids):
            row = token_ids_cpu[i, : num_tokens_no_spec[i]]
            guesses.append(self._guess(row, len(row) - len(new), resumed, plain) if new else [])
        return guesses

    def _guess(self, row: Ids, before: int, resumed: list[_Resumed], plain: set[tuple[int, int]]) -> list[int]:
        """Behind `row`, of which this step has found what stands from `before` on."""
        one = next((one for one in resumed if _goes_on(one, row)), None)
        if one is not None:
            resumed.remove(one)
            read, cut = one.read, one.cut
        elif (before, int(row[before - 1])) in plain or (found := self._first_guess(row[:before])) is None:
            self._plain.add((len(row), int(row[-1])))
            return []
        else:
            read, cut = found, before
        self._resumed.append(_Resumed(read, cut, len(row), int(row[-1])))
        # The first pair may begin before the cut.
        return continuation(read[cut - 1 :], row[-2:].tolist(), len(row) - cut, self._n)

    def _first_guess(self, prompt: Ids) -> Ids | None:
        """The draft from which a new request goes on. A prompt that asks for a validity is noted instead."""
        probe = np.flatnonzero(prompt >= self._vocab_size)
        if len(probe):
            self._note(prompt[: probe[0]].copy())
            return None
        while self._read and self._read[0][1] < time.monotonic() - _SECONDS:
            self._read.popleft()
        return next((text for text, _ in self._read if _begins(prompt, text)), None)

    def _note(self, text: Ids) -> None:
        """A draft was read up to a cut. Of several cuts the last one says most."""
        for i, (other, _) in enumerate(self._read):
            if _begins(text, other):
                text = other
            if _begins(other, text):
                del self._read[i]
                break
        self._read.append((text, time.monotonic()))


def _goes_on(one: _Resumed, row: Ids) -> bool:
    if len(row) <= one.size or row[one.size - 1] != one.last:
        return False
    return np.array_equal(row[: one.cut], one.read[: one.cut])


def _begins(part: Ids, text: Ids) -> bool:
    n = len(part)
    return 0 < n <= len(text) and part[-1] == text[n - 1] and np.array_equal(part, text[:n])
