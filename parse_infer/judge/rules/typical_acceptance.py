"""Medusa's typical acceptance: a draft token is kept if its probability is above min(ε, δ·exp(-H)), H the entropy.

Source: arXiv 2401.10774, section 2.3.1; defaults and the advice δ = √ε from `medusa_generate` of its code
(medusa/model/medusa_model.py, `posterior_threshold` and `posterior_alpha`).

H is that of the target's 20 first choices and of all other tokens taken as one, in process as over servers. At
temperature 1 it is at most the whole entropy, so the rule keeps at most the tokens that it keeps by definition. Below,
it may be a little larger, where much probability is left to the other tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parse_infer.judge.rules.rule import MOST_CHOICES, TokenRule, check_between, of_temperature
from parse_infer.judge.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class TypicalAcceptance(TokenRule):
    """The judge's options: `judge="typical_acceptance:epsilon=0.09,delta=0.3"`.

    Args:
        epsilon: keep draft tokens of more than this probability; default threshold.
        delta: keep draft tokens of more than this times exp(-H) too. Another threshold keeps δ / √ε as it is here.
        temperature: of probabilities and entropy; for Medusa's own rule that of the requests.

    Raises:
        ValueError: a value is not above 0 and at most 1.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 1

    summary = "Medusa's typical acceptance: keeps likely tokens, and less likely ones where the target is uncertain"

    def __post_init__(self) -> None:
        for option in ("epsilon", "delta", "temperature"):
            check_between("typical_acceptance", option, getattr(self, option), 0, 1)

    @property
    def k(self) -> int:
        return MOST_CHOICES

    @property
    def threshold(self) -> float:
        return self.epsilon

    @property
    def _ratio(self) -> float:
        return self.delta / math.sqrt(self.epsilon)

    @property
    def fingerprint(self) -> str:
        return f"typical-acceptance:ratio={self._ratio:.6g}" + of_temperature(self.temperature)

    def log_scores(self, found: TokenLogprobs) -> Tensor:
        """With δ = c·√ε, a token is kept for each ε below p or below (p·exp(H) / c)²."""
        found = found.at_temperature(self.temperature)
        return torch.maximum(found.own, 2 * (found.own + found.entropy - math.log(self._ratio)))
