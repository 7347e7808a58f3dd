"""The probe of a verification pass, and the validity head on the target's hidden states.

    validity = sigmoid(w · h + b − doubt)

h is the final-norm state of the probe's last token. `doubt` pools the doubt about the prefix's single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import ModelError
from parse_infer.models.architecture import output_layer


@dataclass(frozen=True)
class Probe:
    """The token suffix that the verification pass appends to each prefix.

    Attributes:
        ids: P token ids; the head reads the last one. Empty for a head that uses token doubt alone.
        text: the probe's text.
        closes_turn: the probe itself ends the assistant's turn, so it does not see the draft's own end token.
    """

    ids: tuple[int, ...]
    text: str
    closes_turn: bool = False


class TokenDoubt(nn.Module):
    """Doubt of each draft token, pooled over the prefixes that contain the token.

    A small network reads three inputs: the hidden state before a token (the target's expectation), the token's
    embedding (the draft's choice), and the token's surprisal under the target. A wrong digit raises the doubt; a
    different wording does not. The verification pass already has the hidden states, so only the output layer runs
    again, on the draft. Judge Decoding (arXiv 2501.19309) also reads single tokens. Here the head pools the doubt over
    a prefix and trains on prefix labels alone.

    Args:
        hidden_size: H.
        rank: inner size.
        vocabulary: int64 [n], ascending: the tokens that `surprise` compares with; None: all tokens.
    """

    vocabulary: Tensor | None

    WIDTH = 64
    SURPRISE = 3  # log-probability, entropy, log-probability minus the highest

    def __init__(self, hidden_size: int, rank: int, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("vocabulary", vocabulary)
        self.dropout = nn.Dropout(0.0)  # on the hidden states, in training
        self.expected = nn.Linear(hidden_size, rank, bias=False)
        self.written = nn.Linear(hidden_size, rank, bias=False)
        self.weigh = nn.Linear(3 * rank + self.SURPRISE, self.WIDTH)
        self.out = nn.Linear(self.WIDTH, 1)
        self._start_from_surprise()

    @torch.no_grad()
    def _start_from_surprise(self) -> None:
        """Initialise the doubt to the log-probability gap to the target's greedy choice, minus 3 nats, plus a small
        random part. A random start learns a worse judge from a few thousand drafts. (z = silu(z) - silu(-z).)"""
        self.weigh.weight[:2], self.weigh.bias[:2] = 0, 0
        self.weigh.weight[0, -1], self.weigh.weight[1, -1] = -3, 3  # forward divides the surprise by 3
        self.out.weight *= 0.1
        self.out.weight[0, 0], self.out.weight[0, 1] = 1, -1
        self.out.bias.fill_(-3)

    def forward(self, expected: Tensor, written: Tensor, surprise: Tensor) -> Tensor:
        """Compute the doubt [..., T] in float32 from the final-norm states before T tokens, the tokens' embeddings
        (both [..., T, H]) and their `TokenSurprisal.features` [..., T, 3]."""
        a = in_float32(self.expected, rms_norm(self.dropout(expected.float()), expected.shape[-1:]))
        b = in_float32(self.written, rms_norm(written.float(), written.shape[-1:]))
        weighed = silu(in_float32(self.weigh, torch.cat([a, b, a * b, surprise / 3], dim=-1)))
        return in_float32(self.out, weighed)[..., 0]

    @staticmethod
    def pool_over_prefixes(doubt: Tensor, ends: Tensor) -> Tensor:
        """Pool the doubt [..., T] of tokens over prefixes of `ends` [..., K] tokens by logsumexp: [..., K]; 0 for an
        empty prefix."""
        return doubt.logcumsumexp(-1).gather(-1, (ends - 1).clamp_min(0)).masked_fill(ends <= 0, 0)


def in_float32(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply `layer` in float32, since DeepSpeed keeps weights in bfloat16 in training. No copy of float32 weights."""
    return linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())


# Chunk size of the output layer in tokens. It bounds the memory; a GPU needs larger chunks for fewer launches.
_ROWS, _ROWS_ON_CPU = 512, 128
_CACHED_LOGITS = 2**20  # logits per chunk on a CPU, small enough for its cache, since five operations read them


class TokenSurprisal(NamedTuple):
    """Surprisal of tokens under the target.

    Attributes:
        features: float32 [T, 3]: log-probability, entropy, log-probability minus the highest.
        is_greedy_choice: bool [T]: whether the token is the target's greedy choice; None for a reduced vocabulary.
    """

    features: Tensor
    is_greedy_choice: Tensor | None

    def greedy_choices(
        self, hidden: Tensor, tokens: Tensor, logits: Callable[[Tensor], Tensor], known: Tensor | None = None
    ) -> Tensor:
        """Return `is_greedy_choice`. With a reduced vocabulary, read the full output layer where only that decides.

        Args:
            hidden, tokens, logits: as in `surprise`.
            known: bool [T], tokens that count as the greedy choice in any case.
        """
        if self.is_greedy_choice is not None:
            return self.is_greedy_choice
        is_choice = torch.zeros_like(tokens, dtype=torch.bool) if known is None else known.clone()
        unknown = ~is_choice & (self.features[:, 2] == 0)  # any higher logit rules a token out
        if unknown.any():
            is_choice[unknown] = logits(hidden[unknown]).argmax(-1) == tokens[unknown]
        return is_choice


@dataclass(frozen=True)
class ReducedLMHead:
    """The output layer for part of the vocabulary; all 49,152 tokens of a model cost a seventh of a pass.

    Attributes:
        tokens: int64 [n], ascending.
        logits: [T, H] -> [T, n].
    """

    tokens: Tensor
    logits: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: Tensor) -> ReducedLMHead:
        return cls(tokens, output_layer(model, tokens))


@torch.no_grad()
def surprise(
    hidden: Tensor,
    tokens: Tensor,
    logits: Callable[[Tensor], Tensor],
    part: ReducedLMHead | None = None,
    rows: int | None = None,
) -> TokenSurprisal:
    """Compute the surprisal of each token under the target. With a reduced output layer, `is_greedy_choice` is None.

    Args:
        hidden: [T, H], the final-norm states before the tokens.
        tokens: int64 [T].
        logits: the output layer, [n, H] -> [n, V].
        part: reduced output layer; tokens outside it use the full one.
        rows: chunk size in tokens; default 512, on a CPU 128 for the output layer and fewer for what reads its logits.
    """
    if part is None:
        return _surprise(hidden, tokens, logits, rows)
    place = torch.searchsorted(part.tokens, tokens).clamp_max(len(part.tokens) - 1)
    features = _surprise(hidden, place, part.logits, rows).features
    others = part.tokens[place] != tokens
    if others.any():
        features[others] = _surprise(hidden[others], tokens[others], logits, rows).features
    return TokenSurprisal(features, None)


def _surprise(hidden: Tensor, tokens: Tensor, logits: Callable[[Tensor], Tensor], rows: int | None) -> TokenSurprisal:
    if not len(tokens):
        return TokenSurprisal(hidden.new_zeros(0, TokenDoubt.SURPRISE, dtype=torch.float32), tokens == 0)
    parts, chosen, on_cpu = [], [], hidden.device.type == "cpu"
    many = rows or (_ROWS_ON_CPU if on_cpu else _ROWS)
    for states, ids in zip(hidden.split(many), tokens.split(many), strict=True):
        scores = logits(states)
        few = max(1, _CACHED_LOGITS // scores.shape[-1]) if on_cpu and rows is None else many
        for some, id in zip(scores.split(few), ids.split(few), strict=True):
            x = some.float()
            top, best = x.max(-1)
            weights = (x - top[:, None]).exp_()
            total = weights.sum(-1)
            mean = weights.mul_(x).sum(-1) / total
            own = x.gather(-1, id[:, None])[:, 0]
            log_total = top + total.log()
            parts.append(torch.stack([own - log_total, log_total - mean, own - top], dim=-1))
            chosen.append(best == id)
    return TokenSurprisal(torch.cat(parts), torch.cat(chosen))


class ValidityHead(nn.Module):
    """Validity logit w · h + b of a probe's final-norm hidden state h, minus the doubt about the prefix; float32.

    Args:
        hidden_size: H.
        token_rank: inner size of `TokenDoubt`; 0: no token doubt.
        vocabulary: of `TokenDoubt`.
        probe: False: no probe and no w, so that the head uses token doubt alone.

    Raises:
        ValueError: neither probe nor token doubt.
    """

    def __init__(
        self, hidden_size: int, token_rank: int = 0, vocabulary: Tensor | None = None, probe: bool = True
    ) -> None:
        super().__init__()
        if not (probe or token_rank):
            raise ModelError("a validity head needs a probe or token doubt")
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.zeros(hidden_size)) if probe else None
        self.bias = nn.Parameter(torch.zeros(()))
        self.tokens = TokenDoubt(hidden_size, token_rank, vocabulary) if token_rank else None

    def forward(self, hidden: Tensor | None, doubt: Tensor | None = None) -> Tensor:
        """Map probe states [..., H] (None without a probe) and the prefixes' doubt [...] to logits [...]."""
        logits = self.bias.float()
        if self.weight is not None:
            logits = cast(Tensor, hidden).float() @ self.weight.float() + logits
        return logits if doubt is None else logits - doubt

    @classmethod
    def from_verbalizer(cls, model: PreTrainedModel, yes_id: int, no_id: int) -> ValidityHead:
        """Build the head that compares two tokens' logits: w = lm_head[yes] - lm_head[no].

        The head ignores a final soft-cap, which bends both logits alike.

        Raises:
            ValueError: both tokens are the same.
        """
        if yes_id == no_id:
            raise ModelError(f"the two verbalizer tokens must differ, both are {yes_id}: choose other words")
        output, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        head = cls(output.weight.shape[1]).to(output.weight.device)
        with torch.no_grad():
            cast(Tensor, head.weight).copy_((output.weight[yes_id].float() - output.weight[no_id].float()) * scale)
            if getattr(output, "bias", None) is not None:
                head.bias.copy_((output.bias[yes_id].float() - output.bias[no_id].float()) * scale)
        return head


def verbalizer_ids(tokenizer: PreTrainedTokenizerBase, probe_text: str, words: Sequence[str]) -> tuple[int, ...]:
    """Return the first token of each word after `probe_text`.

    Raises:
        ValueError: two words begin with the same token.
    """
    probe = tokenizer.encode(probe_text, add_special_tokens=False)
    ids = []
    for word in words:
        joined = tokenizer.encode(probe_text + word, add_special_tokens=False)
        continues = joined[: len(probe)] == probe and len(joined) > len(probe)
        ids.append(joined[len(probe)] if continues else tokenizer.encode(word, add_special_tokens=False)[0])
    if len(set(ids)) < len(ids):
        raise ModelError(f"the verbalizer words {' and '.join(words)} begin with the same token: choose other words")
    return tuple(ids)
