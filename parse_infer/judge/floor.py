"""A trained judge with a floor: a kept token needs the judge's validity, and a rule at its own options.

`adapter=…` with `judge="min_p:ratio=0.01"` also rejects what the target finds less than 0.01 times as likely as its
first choice, whatever the judge says. The threshold is the judge's. The rule's options are fixed and part of the
fingerprint, so a calibration holds for this floor only. A threshold of 0 accepts everything, as without a floor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading, Scorer, Verdict, looks_ahead
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.models.decoder import Trailing


class FlooredJudge:
    """A `Judge` with a floor."""

    tokens_per_cut = 0

    def __init__(self, adapter: ValidityAdapter, floor: TokenRule) -> None:
        self.adapter, self.floor = adapter, floor
        self.config, self.train_problems = adapter.config, adapter.train_problems

    @property
    def fingerprint(self) -> str:
        return floored(self.adapter.fingerprint, self.floor)

    def scorer(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: PreTrainedModel | None = None
    ) -> FlooredScorer:
        return FlooredScorer(self.adapter.scorer(tokenizer, end_ids, model), self.floor)


class FlooredScorer:
    """A `Scorer` of single tokens whose validity is 0 from the first token below the floor on."""

    def __init__(self, scorer: Scorer, floor: TokenRule) -> None:
        self._scorer, self._floor = scorer, floor
        self.k, self.by_token, self.first_tokens = max(scorer.k, floor.k), scorer.by_token, scorer.first_tokens
        self.looks_ahead = floor.looks_ahead or looks_ahead(scorer)
        self.layers = getattr(scorer, "layers", ())

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing | None:
        return self._scorer.trailing(reading, carried, device)

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        if not len(reading.draft):
            return self._scorer.score(reading, carried)
        reading = replace(reading, found=reading.logprobs(self.k))  # one pass of the output layer for both
        verdict = self._scorer.score(reading, carried)
        below = self._floor.is_below(reading.logprobs(self._floor.k))
        first = next((i for i, is_below in enumerate(below.tolist()) if is_below), len(reading.draft))
        validity = [0.0 if cut > first else value for cut, value in zip(verdict.cuts, verdict.validity, strict=True)]
        return replace(verdict, validity=validity)


def floored(fingerprint: str, floor: TokenRule) -> str:
    """The fingerprint of a judge with a floor."""
    return f"{fingerprint}, {floor.fingerprint} at {floor.threshold:.6g}"
