"""SGLang's accept threshold: a draft token is kept if the target gives it at least a probability of `single`.

Source: `--speculative-accept-threshold-single`, as `TreeSpeculativeSamplingTargetOnly` reads it
(sgl-kernel/csrc/speculative/speculative_sampling.cuh). SGLang applies it to sampled answers only, after temperature,
top_k and top_p. It also keeps a token if a uniform random number is at most its probability over
`--speculative-accept-threshold-acc`. That part is left out: a judge sees neither the request's seed nor its sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parse_infer.judge.rules.rule import MOST_CHOICES, TokenRule, check_between, of_temperature
from parse_infer.judge.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class AcceptThreshold(TokenRule):
    """The judge's option: `judge="accept_threshold:single=0.3"`.

    Args:
        single: keep draft tokens of at least this probability; default threshold. SGLang's default is 1.
        temperature: of the probabilities; for SGLang's own rule that of the requests.

    Raises:
        ValueError: a value is not above 0 and at most 1.
    """

    single: float = 0.3
    temperature: float = 1

    summary = "SGLang's accept_threshold_single: keeps draft tokens of at least this probability"

    def __post_init__(self) -> None:
        for option in ("single", "temperature"):
            check_between("accept_threshold", option, getattr(self, option), 0, 1)

    @property
    def k(self) -> int:
        return 1 if self.temperature == 1 else MOST_CHOICES

    @property
    def threshold(self) -> float:
        return self.single

    @property
    def fingerprint(self) -> str:
        return "accept-threshold" + of_temperature(self.temperature)

    def log_scores(self, found: TokenLogprobs) -> Tensor:
        return found.at_temperature(self.temperature).own
