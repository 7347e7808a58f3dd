"""Token proposer for vLLM: speculative tokens from the rejected rest of a draft.

vLLM's speculative decoding accepts a custom class (`{"method": "custom_class", "model": …}`) and passes it the tokens
of every request in the batch, without request names. Prompts of validity requests hold a draft. A new request whose
whole prompt is a prefix of such a prompt resumes from a cut. Its speculative tokens come from the rejected rest of the
draft (`parse_infer.speculation.rejected_draft`). This needs no extra request and no model, and is lossless.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from parse_infer.speculation.rejected_draft import Ids, continuation
from parse_infer.vllm_plugin.options import SETTINGS

_SECONDS = 10.0  # lifetime of a draft; later requests do not resume from it


@dataclass(frozen=True, eq=False)
class _Resumed:
    """A request that resumes from a cut of a draft, with `size` tokens so far, of which `last` is the last."""

    read: Ids
    cut: int
    size: int
    last: int


class RejectedDrafts:
    """Proposer for vLLM, called once per step, after sampling."""

    def __init__(self, vllm_config: Any) -> None:
        self._n = vllm_config.speculative_config.num_speculative_tokens
        self._vocab_size = getattr(vllm_config.model_config.hf_config, SETTINGS)["vocab_size"]
        # Contexts, each with the longest known part of its draft and the time of the request; oldest first.
        self._read: deque[tuple[Ids, float]] = deque(maxlen=vllm_config.scheduler_config.max_num_seqs)
        self._resumed: list[_Resumed] = []
        self._plain: set[tuple[int, int]] = set()  # size and last token of each other request

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the proposer has no model."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Ids, token_ids_cpu: Ids, **_: Any
    ) -> list[list[int]]:
        """Propose speculative tokens for each request in the batch, possibly none.

        Args:
            sampled_token_ids: new tokens of each request; empty while its prompt is not fully prefilled.
            num_tokens_no_spec, token_ids_cpu: number of tokens per request, and the tokens [n, longest].
        """
        resumed, plain = self._resumed, self._plain
        self._resumed, self._plain = [], set()
        proposed: list[list[int]] = []
        for i, new in enumerate(sampled_token_ids):
            row = token_ids_cpu[i, : num_tokens_no_spec[i]]
            proposed.append(self._propose_one(row, len(row) - len(new), resumed, plain) if new else [])
        return proposed

    def _propose_one(self, row: Ids, before: int, resumed: list[_Resumed], plain: set[tuple[int, int]]) -> list[int]:
        """Propose tokens after `row`, whose tokens from `before` on are new in this step."""
        one = next((one for one in resumed if _goes_on(one, row)), None)
        if one is not None:
            resumed.remove(one)
            read, cut = one.read, one.cut
        elif (before, int(row[before - 1])) in plain or (found := self._match_draft(row[:before])) is None:
            self._plain.add((len(row), int(row[-1])))
            return []
        else:
            read, cut = found, before
        self._resumed.append(_Resumed(read, cut, len(row), int(row[-1])))
        # The first pair may begin before the cut.
        return continuation(read[cut - 1 :], row[-2:].tolist(), len(row) - cut, self._n)

    def _match_draft(self, prompt: Ids) -> Ids | None:
        """The draft from which a new request resumes. A validity request's draft is stored instead."""
        probe = np.flatnonzero(prompt >= self._vocab_size)
        if len(probe):
            self._store(prompt[: probe[0]].copy())
            return None
        while self._read and self._read[0][1] < time.monotonic() - _SECONDS:
            self._read.popleft()
        return next((text for text, _ in self._read if _begins(prompt, text)), None)

    def _store(self, text: Ids) -> None:
        """Store a draft up to a cut; of several cuts, keep the longest prefix."""
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
