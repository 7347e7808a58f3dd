"""A validity head on log-probabilities: a small causal network that any engine's output can feed.

    validity = sigmoid(b − pooled doubt about each draft token)

It needs no hidden states, no weights of the target and no plugin. A token that equals the target's first choice adds
no doubt, because the target would have written the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from parse_infer.errors import SettingsError
from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.judge import Reading, Verdict, token_verdict
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts, certain_features, n_features
from parse_infer.judge.usual_drafts import UsualDrafts

if TYPE_CHECKING:
    from parse_infer.models.decoder import Trailing

_SURE = 1e4  # logit
KNOWN_TEXT = "There are 12 eggs in a box. How many eggs are in 7 boxes?"  # which a server must be able to read
NO_DOUBT = -30.0  # finite: logcumsumexp has no gradient for a row of -inf


@dataclass(frozen=True)
class LogprobHeadConfig:
    """Sizes of a `LogprobHead`.

    Attributes:
        k: number of first choices that it reads.
        width: size of the layers and of the recurrent state.
        text_size: size of a token's embedding; 0: the head knows flags of a token, and not its text.
        buckets: hash values of the byte n-grams.
        sharpness: how verdicts pool the doubt about tokens (`pool_doubt`). 1, for adapters without this field: by its
            sum, so a token may be rejected for the doubt before it. High: nearly by the most doubtful token alone.
    """

    k: int = 5
    width: int = 64
    text_size: int = 32
    buckets: int = 8192
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("k", "width", "text_size", "buckets"):
            if type(getattr(self, name)) is not int:
                raise SettingsError(f"the head's {name} is {getattr(self, name)!r}; it must be a whole number")
        if not isinstance(self.sharpness, int | float):
            raise SettingsError(f"the head's sharpness is {self.sharpness!r}; it must be a number")


def pool_doubt(doubt: Tensor, sharpness: float) -> Tensor:
    """Pool the doubt of tokens [..., T] over each prefix, [..., T], by logsumexp with a sharpness of at least 1
    (Pinheiro and Collobert 2015, arXiv 1411.6228). n equal doubts pool to the doubt + log(n) / sharpness."""
    return (sharpness * doubt).logcumsumexp(-1) / sharpness


def in_float32(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply `layer` in float32, since DeepSpeed keeps weights in bfloat16 in training. No copy of float32 weights."""
    return linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())


class LogprobHead(nn.Module):
    """Doubt of each draft token, from the target's log-probabilities of it and of the tokens before it.

    The doubt starts as the gap to the target's first choice, minus 3 nats: untrained, the head is that baseline. The
    recurrent layer (GRU) reads the answer from its first token.

    Args:
        config: sizes.
    """

    def __init__(self, config: LogprobHeadConfig) -> None:
        super().__init__()
        self.config = config
        size = n_features(config.k) + 2 * TokenTexts.FLAGS + 3 * config.text_size
        if config.text_size:
            self.texts = nn.EmbeddingBag(config.buckets, config.text_size, mode="mean")
            nn.init.normal_(self.texts.weight, std=0.3)
        self.read = nn.Linear(size, config.width)
        self.recall = nn.GRU(config.width, config.width, batch_first=True)
        self.weigh = nn.Linear(2 * config.width, config.width)
        self.out = nn.Linear(config.width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, -3.0)
        self.gap = nn.Parameter(torch.ones(1))  # DeepSpeed cannot broadcast a 0-d parameter
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, features: Tensor, ids: Tensor, first: Tensor, texts: TokenTexts, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the doubt about each token, [B, T], and the state after each, [B, T, width], both float32; arguments
        as of `encode`."""
        hidden, states = self.encode(features, ids, first, texts, memory)
        return self.doubt(features, hidden), states

    def doubt(self, features: Tensor, hidden: Tensor) -> Tensor:
        """Map the features [B, T, F] and `encode`'s result to the doubt about each token, float32 [B, T]."""
        return self.gap * 3 * features[..., 1] + in_float32(self.out, hidden)[..., 0]

    def encode(
        self, features: Tensor, ids: Tensor, first: Tensor, texts: TokenTexts, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what the head knows of each token, and the state after each, both float32 [B, T, width].

        Args:
            features: [B, T, F], `TokenLogprobs.features`.
            ids, first: int64 [B, T], the tokens and the target's first choices.
            memory: [B, width], the state before the first token; None: the answer begins there.
        """
        distinct, place = torch.unique(torch.stack([ids, first]), return_inverse=True)
        values, offsets, flags = (part.to(features.device) for part in texts.of(distinct.tolist()))
        parts = [features, flags[place[0]], flags[place[1]]]
        if self.config.text_size:
            written, expected = self.texts(values, offsets)[place].float()
            parts += [written, expected, written * expected]
        read = silu(in_float32(self.read, torch.cat(parts, dim=-1)))
        begun = read.new_zeros(1, len(read), self.config.width) if memory is None else memory[None]
        weights = [each.float() for each in self.recall.all_weights[0]]  # DeepSpeed keeps bfloat16 in training
        states, _ = torch.gru(read, begun, weights, True, 1, 0.0, self.training, False, True)
        return silu(in_float32(self.weigh, torch.cat([read, states], dim=-1))), states


class LogprobScorer:
    """Scores the tokens of an answer, block by block.

    Args:
        head: the trained head.
        texts: the target's tokens.
        usual: the drafts that the head can judge; None: all.
        to_validity: converts logits to probabilities.
    """

    by_token = True

    def __init__(
        self,
        head: LogprobHead,
        texts: TokenTexts,
        usual: UsualDrafts | None = None,
        to_validity: Callable[[Tensor], Tensor] = torch.sigmoid,
    ) -> None:
        self.head, self.texts, self.usual, self.to_validity = head, texts, usual, to_validity
        self.bias: Tensor = head.bias
        self.k = head.config.k

    @property
    def first_tokens(self) -> int:
        return 0 if self.usual is None else max(self.usual.ranges, default=0)

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing | None:
        return None

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        score = partial(self.token_scores, carried=carried, written=reading.written)
        return token_verdict(reading, self.k, score, self.to_validity)

    @torch.inference_mode()
    def token_scores(
        self,
        found: TokenLogprobs,
        carried: Carried,
        written: Sequence[int] = (),
        correct: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> TokenScores:
        """Score the tokens of a block.

        Args:
            found: at least one token.
            carried: the state after the last accepted draft token.
            written: tokens that the target has written since.
            correct: maps the doubt [T] and what `LogprobHead.encode` says, [T, width], to another doubt.
        """
        k = self.k
        device = self.bias.device
        own = torch.tensor(list(written), dtype=torch.long, device=device)
        features = torch.cat([certain_features(len(own), k).to(device), found.features.to(device)])
        ids = torch.cat([own, found.ids.to(device)])
        first = torch.cat([own, found.top_ids[:, 0].to(device)])
        memory = torch.tensor([carried.memory], device=device) if carried.memory else None
        hidden, states = self.head.encode(features[None], ids[None], first[None], self.texts, memory)
        each = self.head.doubt(features[None], hidden)[0, len(own) :]
        each = each.masked_fill(found.is_greedy_choice.to(device), -torch.inf)
        if correct is not None:
            each = correct(each, hidden[0, len(own) :])
        doubt = pool_doubt(torch.cat([each.new_tensor([carried.doubt]), each]), self.head.config.sharpness)[1:]
        usual, seen = carried.usual, carried.seen
        if self.usual is None:
            usual = True
        elif usual is None:
            usual, seen = self.usual.look(found, seen)
        logits = self.bias - doubt
        if usual is False:
            same = found.is_greedy_choice.to(device).cumprod(0).bool()
            logits = torch.where(same, _SURE, -_SURE).float()
        return TokenScores(logits, doubt, states[0, len(own) :], usual, seen)
