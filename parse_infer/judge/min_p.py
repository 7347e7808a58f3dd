"""A judge without training: a draft token is kept if min-p sampling of the target could have written it.

min-p sampling (arXiv 2407.01082) draws among the tokens that are at least `ratio` times as likely as the first choice.
So every token of a greedy answer is one that the target itself offers, and at 1 it is the target's greedy answer. (Of
a sampled answer the draft's tokens are, at temperature 1; the target's own follow the request's sampling.) The judge
needs the target's log-probabilities alone, so it works for any pair and on any server.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from parse_infer.errors import SettingsError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.judge import Reading, Verdict, token_verdict
from parse_infer.judge.logprob_head import KNOWN_TEXT
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.text.cuts import CutPolicy

_TIE = 1e-6  # nats by which a token as likely as the first choice falls behind it: at 1 the answer is greedy


@dataclass(frozen=True)
class MinP:
    """The judge's option: `judge="min_p:ratio=0.3"`.

    Args:
        ratio: keep draft tokens at least this many times as likely as the target's first choice; default threshold.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """

    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise SettingsError(f"the ratio of min_p is {self.ratio}; it must be above 0 and at most 1")

    def load(self, tokenizer: PreTrainedTokenizerBase, model: object = None) -> MinPJudge:
        return MinPJudge(tokenizer, self.ratio)


class MinPJudge:
    """A `Judge`. The validity of an answer is the lowest ratio of a draft token's probability to that of the target's
    first choice.

    Args:
        tokenizer: of the target.
        ratio: default threshold.
    """

    k, by_token, first_tokens, tokens_per_cut = 1, True, 0, 0
    fingerprint = "min-p"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ratio: float) -> None:
        self.config = ValidityConfig(
            target={},
            logprobs={"reference": {"ids": tokenizer.encode(KNOWN_TEXT), "logprobs": []}},
            cut_policy=CutPolicy().to_dict(),
            label={"kind": "min-p"},
            threshold=ratio,
        )

    def scorer(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: object = None) -> MinPJudge:
        return self

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> None:
        return None

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        return token_verdict(reading, self.k, partial(lowest_ratios, carried=carried), torch.sigmoid)


@torch.inference_mode()
def lowest_ratios(found: TokenLogprobs, carried: Carried) -> TokenScores:
    """Score tokens by the lowest ratio so far. What the target has written between blocks adds nothing."""
    gap = (found.top[:, 0] - found.own).clamp_min(_TIE)
    gap = gap.masked_fill(found.is_greedy_choice.to(gap.device), 0.0)
    doubt = torch.cat([gap.new_tensor([max(carried.doubt, 0.0)]), gap]).cummax(0).values[1:]
    return TokenScores(-doubt.expm1().log(), doubt)  # the logit of exp(-doubt), the lowest ratio
