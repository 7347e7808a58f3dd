"""A `LogprobHead`, and a correction of its doubt by hidden states of the target.

They are of the pass over the draft itself (*layers*), of a second stream, or both:

    input_ids    [ prompt … | d1 d2 … dT | d1′ d2′ … dT′ ]
    position_ids [ 0 … n-1  | n … n+T-1  | n … n+T-1     ]
    mask           prompt and draft: causal · dᵢ′ sees the prompt and d1′ … dᵢ′
    LoRA           on at d′ only

The draft's own keys were computed to predict the next token. Those of the second stream are trained to judge, and are
dropped after the pass. The layout is that of one probe whose tokens are the draft (`parse_infer.judge.packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, silu

from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig, in_float32
from parse_infer.judge.token_logprobs import TokenTexts


@dataclass(frozen=True)
class StreamHeadConfig:
    """Sizes of a `StreamHead`.

    Attributes:
        hidden_size: H of the target.
        size: inner size of the correction.
        floor: tokens that the trunk doubts less, and the target's first choices, are not corrected. So a draft without
            other tokens needs no second stream.
        layers: the correction reads the inputs of these layers at the draft's own tokens, counted as in
            `Decoder.capture_hidden`. The pass over the draft computes them anyway.
        second: whether there is a second stream.
    """

    hidden_size: int
    size: int = 64
    floor: float = -5.0
    layers: Sequence[int] = ()
    second: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", list(self.layers))  # as in JSON

    @property
    def states(self) -> int:
        """S, the number of hidden states that the correction reads of a token."""
        return len(self.layers) + self.second


class StreamHead(nn.Module):
    """Doubt of each draft token: the trunk's, plus a correction that starts at zero.

    Args:
        trunk: reads the log-probabilities; not trained further.
        config: sizes.
    """

    def __init__(self, trunk: LogprobHead, config: StreamHeadConfig) -> None:
        super().__init__()
        self.trunk, self.stream = trunk.requires_grad_(False), config
        self.project = nn.Linear(config.states * config.hidden_size, config.size)
        self.beside = nn.Linear(trunk.config.width, config.size)
        self.out = nn.Linear(config.size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.bias = nn.Parameter(trunk.bias.detach().clone())

    @property
    def config(self) -> LogprobHeadConfig:
        return self.trunk.config

    @torch.no_grad()
    def doubted(
        self, features: Tensor, ids: Tensor, first: Tensor, texts: TokenTexts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trunk's doubt [B, T], what it knows of each token [B, T, width], and the tokens to correct, bool
        [B, T]; arguments as of `LogprobHead.encode`, from the answer's start."""
        hidden, _ = self.trunk.encode(features, ids, first, texts)
        doubt = self.trunk.doubt(features, hidden)
        return doubt, hidden, (doubt > self.stream.floor) & (ids != first)

    def correct(self, doubt: Tensor, hidden: Tensor, states: Tensor, where: Tensor, p_dropout: float = 0.0) -> Tensor:
        """Add the correction to the doubt about some tokens.

        Args:
            doubt: float32 [..., T], the trunk's.
            hidden: float32 [..., T, width], `LogprobHead.encode`'s.
            states: [..., T, S, H], of the layers, then of the second stream.
            where: bool [..., T], the tokens to correct.
        """
        read = layer_norm(states.float(), states.shape[-1:]).flatten(-2)
        inner = silu(in_float32(self.project, read) + in_float32(self.beside, hidden))
        more = in_float32(self.out, dropout(inner, p_dropout, self.training))[..., 0]
        return torch.where(where, doubt + more, doubt)
