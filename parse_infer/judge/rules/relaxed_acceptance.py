"""TensorRT-LLM's relaxed acceptance: a draft token is kept if it is nearly as probable as the first choice.

Source: `mtpRelaxedAcceptanceKernel` (cpp/tensorrt_llm/kernels/speculativeDecoding/mtpKernels.cu) and
`use_relaxed_acceptance_for_thinking` with `relaxed_topk` and `relaxed_delta` (tensorrt_llm/_torch/speculative/mtp.py).
The kernel compares probabilities, not their logarithms. TensorRT-LLM relaxes thinking only. Here the rule holds for
whole answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parse_infer.errors import SettingsError
from parse_infer.judge.rules.rule import MOST_CHOICES, TokenRule, check_count
from parse_infer.judge.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class RelaxedAcceptance(TokenRule):
    """The judge's options: `judge="relaxed_acceptance:relaxed_topk=10,relaxed_delta=0.6"`.

    Args:
        relaxed_topk: number of first choices among which a draft token must be.
        relaxed_delta: largest difference of its probability to the first choice's; the threshold is 1 minus this.

    Raises:
        ValueError: a value out of range.
    """

    relaxed_topk: float = 10
    relaxed_delta: float = 0.6

    summary = "TensorRT-LLM's relaxed acceptance: among the target's first choices, and nearly as probable"

    def __post_init__(self) -> None:
        check_count("relaxed_acceptance", "relaxed_topk", self.relaxed_topk, MOST_CHOICES)
        if not 0 <= self.relaxed_delta < 1:
            raise SettingsError(
                f"the relaxed_delta of relaxed_acceptance is {self.relaxed_delta}; it must be at least 0 and below 1"
            )

    @property
    def k(self) -> int:
        return int(self.relaxed_topk)

    @property
    def threshold(self) -> float:
        return 1 - self.relaxed_delta

    @property
    def fingerprint(self) -> str:
        return f"relaxed-acceptance:relaxed_topk={self.k}"

    def log_scores(self, found: TokenLogprobs) -> Tensor:
        offered = (found.ids[:, None] == found.top_ids).any(-1)
        apart = found.top[:, 0].exp() - found.own.exp()
        return (-apart).log1p().masked_fill(~offered, -torch.inf)
