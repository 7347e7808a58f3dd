"""Scores the tokens of an answer by log-probabilities and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading, Verdict, token_verdict
from parse_infer.judge.logprob_head import LogprobScorer
from parse_infer.judge.packing import probes
from parse_infer.judge.stream.head import StreamHead
from parse_infer.judge.stream.lora import StreamLoRA
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.usual_drafts import UsualDrafts
from parse_infer.models.decoder import Trailing


class StreamScorer(LogprobScorer):
    """A `LogprobScorer` whose doubt is corrected by hidden states of the pass over the draft or of a second stream.

    Args:
        head, texts, usual, to_validity: as in `LogprobScorer`.
        lora: on at the tokens of the second stream; None without one.
        one_pass: read the stream in the pass over the draft; else in a second one, if the trunk doubts a token. The
            verdict is the same.

    Attributes:
        layers: see `StreamHeadConfig`.
        second_passes: number of those so far.
    """

    def __init__(
        self,
        head: StreamHead,
        lora: StreamLoRA | None,
        texts: TokenTexts,
        usual: UsualDrafts | None = None,
        to_validity: Callable[[Tensor], Tensor] = torch.sigmoid,
        *,
        one_pass: bool,
    ) -> None:
        super().__init__(head.trunk, texts, usual, to_validity)
        self.stream, self.lora, self.bias, self.one_pass = head, lora, head.bias, one_pass
        self.layers, self.second_passes = head.stream.layers, 0

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing | None:
        if not (self.lora and self.one_pass and len(reading.draft)):
            return None
        return self._stream(reading, carried, len(reading.draft), device)

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        score = partial(
            self.token_scores,
            carried=carried,
            written=reading.written,
            correct=partial(self._corrected, reading, carried),
        )
        return token_verdict(reading, self.k, score, self.to_validity)

    def _corrected(self, reading: Reading, carried: Carried, doubt: Tensor, hidden: Tensor) -> Tensor:
        """Return the corrected doubt [T], of which the target's first choices are -inf."""
        where = doubt > self.stream.stream.floor
        n, read = len(doubt), []
        if self.lora and reading.trailing is None:
            doubted = where.nonzero()
            if not len(doubted):
                return doubt
            n = int(doubted[-1]) + 1
        if self.layers:
            assert reading.inner is not None
            read.append(reading.inner[:n])
        if self.lora:
            read.append(self._second(reading, carried, n, doubt.device)[:, None])
        states = torch.cat(read, dim=1)
        return torch.cat([self.stream.correct(doubt[:n], hidden[:n], states, where[:n]), doubt[n:]])

    def _second(self, reading: Reading, carried: Carried, n: int, device: torch.device) -> Tensor:
        """Return the states of the draft's first n tokens in the second stream, [n, H]."""
        if reading.trailing is not None:
            return reading.trailing[-n:]
        assert reading.read is not None
        self.second_passes += 1
        return reading.read(self._stream(reading, carried, n, device))[-n:]

    def _stream(self, reading: Reading, carried: Carried, n: int, device: torch.device) -> Trailing:
        """The answer up to the draft's n-th token, once more."""
        assert self.lora is not None
        start = len(reading.context) - carried.tokens - len(reading.written)
        ids = [*reading.context[start:], *reading.draft[:n]]
        trailing = probes(ids, [start], len(reading.context) + len(reading.draft), device)
        return replace(trailing, within=partial(self.lora.applied, len(ids)))
