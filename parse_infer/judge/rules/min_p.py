"""A judge without training: a draft token is kept if min-p sampling of the target could have written it.

min-p sampling (arXiv 2407.01082) draws among the tokens that are at least `ratio` times as likely as the first choice.
So every token of a greedy answer is one that the target itself offers, and at 1 it is the target's greedy answer. (Of
a sampled answer the draft's tokens are, at temperature 1; the target's own follow the request's sampling.)

MARS (arXiv 2601.15498) keeps the runner-up if its logit is above 0.9 times the first choice's logit z. That is a ratio
of exp(-0.1 z) here, 0.14 at z = 20. Servers return no logits, so MARS is no rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parse_infer.judge.rules.rule import TokenRule, check_between
from parse_infer.judge.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class MinP(TokenRule):
    """The judge's option: `judge="min_p:ratio=0.3"`.

    Args:
        ratio: keep draft tokens at least this many times as likely as the target's first choice; default threshold.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """

    ratio: float = 0.1

    summary = "keeps what min-p sampling of the target could have written (min_p 0.1)"
    fingerprint = "min-p"

    def __post_init__(self) -> None:
        check_between("min_p", "ratio", self.ratio, 0, 1)

    @property
    def threshold(self) -> float:
        return self.ratio

    def log_scores(self, found: TokenLogprobs) -> Tensor:
        return found.own - found.top[:, 0]
