"""FLy: a mismatch is kept where the target is uncertain and agrees with the next draft tokens.

Source: "Training-Free Loosely Speculative Decoding" (arXiv 2511.22972), its code (fly/models/FLy.py of AMD-AGI/FLy)
and vLLM's pull request 53987. The entropy is summed over the three first choices, in nats. The next `window` tokens
must be first choices. The authors' code counts the mismatch too, so its `win_len` 6 checks five next tokens.

A mismatch whose window reaches beyond the end of the draft is rejected, as in both. So the verdict depends on where a
block ends: with block_tokens "auto" on a measured length. Give a number, or "whole", for reproducible answers, as a
calibration does. Blocks of at most `window` tokens are lossless speculation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from parse_infer.judge.rules.rule import TokenRule, check_between, check_count
from parse_infer.judge.token_logprobs import TokenLogprobs

_CHOICES = 3
_HIGHEST = math.log(_CHOICES)  # entropy of three equally likely tokens


@dataclass(frozen=True)
class FLy(TokenRule):
    """The judge's options: `judge="fly:entropy=0.3,window=6"`.

    Args:
        entropy: least entropy of the target where a mismatch is kept; the threshold is this over log(3).
        window: number of next draft tokens that must be the target's first choices.

    Raises:
        ValueError: a value out of range.
    """

    entropy: float = 0.3
    window: float = 6

    looks_ahead = True
    summary = "FLy: keeps a mismatch where the target is uncertain and agrees with the next tokens"

    def __post_init__(self) -> None:
        check_between("fly", "entropy", self.entropy, 0, _HIGHEST)
        check_count("fly", "window", self.window, 1000)

    @property
    def k(self) -> int:
        return _CHOICES

    @property
    def threshold(self) -> float:
        return self.entropy / _HIGHEST

    @property
    def fingerprint(self) -> str:
        return f"fly:window={int(self.window)}"

    def log_scores(self, found: TokenLogprobs) -> Tensor:
        window = int(self.window)
        same = pad(found.is_greedy_choice.to(found.top.device).int(), (0, window)).cumsum(0)
        agrees = same[window:] - same[:-window] == window  # the next tokens, of which none exists past the draft
        chances = found.top.exp()
        entropy = -torch.where(chances > 0, chances * found.top, 0.0).sum(-1)
        return (entropy / _HIGHEST).log().masked_fill(~agrees, -torch.inf)
