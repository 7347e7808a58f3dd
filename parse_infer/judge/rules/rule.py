"""Judges without training that score single tokens: `TokenRule`, a rule's options, and `RuleJudge`, the `Judge`.

A rule is one file with one frozen dataclass. It needs the target's log-probabilities alone, so it works for any pair
and on any server.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from parse_infer.errors import SettingsError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.judge import Reading, Verdict, token_verdict
from parse_infer.judge.logprob_head import KNOWN_TEXT
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.text.cuts import CutPolicy

MOST_CHOICES = 20
"""First choices that a vLLM server returns at most by default."""
_TIE = 1e-6  # nats by which a token as likely as the first choice falls behind it: at 1 the answer is greedy


class TokenRule(ABC):
    """The options of a rule: a frozen dataclass of numbers with defaults.

    The target's first choice is always kept, because the target would write it.

    Attributes:
        summary: what the rule keeps, in one line.
        k: number of the target's first choices that the rule reads.
        looks_ahead: see `Scorer`.
        threshold: the default threshold, which these options set.
        fingerprint: the rule and the options that another threshold leaves as they are.
    """

    summary: ClassVar[str]
    looks_ahead: ClassVar[bool] = False

    @property
    def k(self) -> int:
        return 1

    @property
    @abstractmethod
    def threshold(self) -> float: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def log_scores(self, found: TokenLogprobs) -> Tensor:
        """The logarithm of the highest threshold at which each token is kept, [T]; -inf: at none above 0."""
        ...

    def load(self, tokenizer: PreTrainedTokenizerBase, model: object = None) -> RuleJudge:
        return RuleJudge(self, tokenizer)

    def is_below(self, found: TokenLogprobs) -> Tensor:
        """Whether these options reject each token, bool [T]."""
        return self.doubts(found) > -math.log(self.threshold)

    @torch.inference_mode()
    def doubts(self, found: TokenLogprobs) -> Tensor:
        """The negated `log_scores`, 0 for the first choice and more for every other token, [T]."""
        doubts = (-self.log_scores(found)).clamp_min(_TIE)
        return doubts.masked_fill(found.is_greedy_choice.to(doubts.device), 0.0)


class RuleJudge:
    """A `Judge` by a rule. The validity of an answer is the lowest score of its draft tokens. What the target has
    written between blocks adds nothing.

    Args:
        tokenizer: of the target.
    """

    by_token, first_tokens, tokens_per_cut = True, 0, 0

    def __init__(self, rule: TokenRule, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rule, self.k, self.fingerprint = rule, rule.k, rule.fingerprint
        self.looks_ahead = rule.looks_ahead
        self.config = ValidityConfig(
            target={},
            logprobs={"reference": {"ids": tokenizer.encode(KNOWN_TEXT), "logprobs": []}},
            cut_policy=CutPolicy().to_dict(),
            label={"kind": rule.fingerprint},
            threshold=rule.threshold,
        )

    def scorer(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: object = None) -> RuleJudge:
        return self

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> None:
        return None

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        return token_verdict(reading, self.k, partial(self.token_scores, carried=carried), torch.sigmoid)

    @torch.inference_mode()
    def token_scores(self, found: TokenLogprobs, carried: Carried) -> TokenScores:
        """Score tokens by the lowest score so far."""
        doubts = self.rule.doubts(found)
        doubt = torch.cat([doubts.new_tensor([max(carried.doubt, 0.0)]), doubts]).cummax(0).values[1:]
        return TokenScores(_logit(doubt), doubt)

    @torch.inference_mode()
    def validity_of_each(self, found: TokenLogprobs) -> Tensor:
        """The score of each token, whatever the others are, [T]."""
        return _logit(self.rule.doubts(found)).sigmoid()


def _logit(doubt: Tensor) -> Tensor:
    """The logit of exp(-doubt)."""
    return -doubt.expm1().log()


def check_between(rule: str, option: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless `value` is above `low` and at most `high`."""
    if not low < value <= high:
        raise SettingsError(f"the {option} of {rule} is {value}; it must be above {low:g} and at most {high:g}")


def of_temperature(temperature: float) -> str:
    """The end of the fingerprint of a rule on probabilities at this temperature."""
    return "" if temperature == 1 else f":temperature={temperature:.6g}"


def check_count(rule: str, option: str, value: float, most: int) -> None:
    """Raise ValueError unless `value` is a whole number from 1 to `most`."""
    if value not in range(1, most + 1):
        raise SettingsError(f"the {option} of {rule} is {value:g}; it must be a whole number from 1 to {most}")
