"""A judge without training: a draft token is kept if min-p sampling of the target could have written it.

min-p sampling (arXiv 2407.01082) draws among the tokens that are at least `min_p` times as likely as the first choice.
So every token of a greedy answer is one that the target itself offers, and at 1 it is the target's greedy answer. (Of
a sampled answer the draft's tokens are, at temperature 1; the target's own follow the request's sampling.) The judge
needs the target's log-probabilities alone, so it works for any pair and on any server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from parse_infer.errors import SettingsError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import KNOWN_TEXT, LogprobHead, LogprobJudge, TokenScores
from parse_infer.judge.probe.head import Probe
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts
from parse_infer.text.cuts import CutPolicy

_TIE = 1e-6  # nats by which a token as likely as the first choice falls behind it: at 1 the answer is greedy


def check_one_judge(adapter: str | Path | None, min_p: float | None, zero_shot: bool) -> None:
    """Raise ValueError for more than one judge, or for a `min_p` out of range."""
    given = {"adapter": adapter is not None, "min_p": min_p is not None, "zero_shot": zero_shot}
    if sum(given.values()) > 1:
        names = " and ".join(name for name, is_given in given.items() if is_given)
        raise SettingsError(f"{names} were given: choose one judge")
    if min_p is not None and not 0 < min_p <= 1:
        raise SettingsError(f"min_p is {min_p}; it must be above 0 and at most 1")


class MinPScorer:
    """Scores the tokens of an answer, block by block, as a `LogprobJudge` does. The validity of an answer is the
    lowest ratio of a draft token's probability to that of the target's first choice."""

    k = 1
    first_tokens = 0  # it can judge any draft
    tokens = None  # no `TokenDoubt`

    @torch.inference_mode()
    def score(self, found: TokenLogprobs, carried: Carried, written: Sequence[int] = ()) -> TokenScores:
        """See `LogprobJudge.score`; what the target has written adds nothing."""
        gap = (found.top[:, 0] - found.own).clamp_min(_TIE)
        gap = gap.masked_fill(found.is_greedy_choice.to(gap.device), 0.0)
        doubt = torch.cat([gap.new_tensor([max(carried.doubt, 0.0)]), gap]).cummax(0).values[1:]
        return TokenScores(-doubt.expm1().log(), doubt)  # the logit of exp(-doubt), the lowest ratio


TokenScorer = LogprobJudge | MinPScorer


def token_scorer(
    config: ValidityConfig, head: LogprobHead | MinPScorer, tokenizer: Any, end_ids: Collection[int]
) -> TokenScorer:
    """Return what scores tokens by the target's log-probabilities, for a judge of this configuration and head."""
    if isinstance(head, MinPScorer):
        return head
    return LogprobJudge(head, TokenTexts(tokenizer, end_ids, head.config.buckets), config.usual_drafts)


MIN_P = 0.1  # of the benchmark's mode


class MinPJudge:
    """Drop-in for `ValidityAdapter` in a `Verifier`.

    Args:
        tokenizer: of the target.
        min_p: default threshold, above 0 and at most 1.
    """

    lora = None
    probe = Probe((), "")
    fingerprint = "min-p"

    def __init__(self, tokenizer: Any, min_p: float) -> None:
        self.head = MinPScorer()
        self.config = ValidityConfig(
            probe_ids=(),
            probe_text="",
            target={},
            logprobs={"reference": {"ids": tokenizer.encode(KNOWN_TEXT), "logprobs": []}},
            cut_policy=CutPolicy().to_dict(),
            label={"kind": "min-p"},
            threshold=min_p,
        )
