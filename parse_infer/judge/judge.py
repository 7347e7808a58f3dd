"""The interface of every judge: `Scorer.score(reading, carried)` returns a `Verdict`.

A `Reading` is what one pass of the target says about a draft. In this process `Verifier` makes it, over servers
`parse_infer.backends.servers.logprob_reads`. A new judge is one file with a `Judge`, and one line in
`parse_infer.judge.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.token_logprobs import TokenLogprobs, read_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from parse_infer.judge.adapter import ValidityConfig
    from parse_infer.models.decoder import Trailing


@dataclass(frozen=True)
class Reading:
    """What one pass of the target says about the T tokens of a draft.

    Attributes:
        draft: the tokens.
        cuts: K strictly increasing offsets in 0..T to judge; None: every token, as in a block.
        written: tokens that the target has written since the last accepted draft token.
        found: log-probabilities that a server returned; None: `logprobs` computes them.
        context: the tokens before the draft; empty over servers.
        hidden: [T, H], the final-norm states before the tokens; None over servers.
        inner: [T, layers, H], the inputs of `Scorer.layers` at the draft's tokens; None over servers.
        logits: the output layer, [n, H] -> [n, V]; None over servers.
        trailing: [n, H], the states of the tokens that `Scorer.trailing` appended to the pass; None: it appended none.
        read: reads tokens after context and draft in another pass, and returns their states [n, H]; None over servers.
    """

    draft: Sequence[int]
    cuts: Sequence[int] | None
    written: Sequence[int] = ()
    found: TokenLogprobs | None = None
    context: Sequence[int] = ()
    hidden: Tensor | None = None
    inner: Tensor | None = None
    logits: Callable[[Tensor], Tensor] | None = None
    trailing: Tensor | None = None
    read: Callable[[Trailing], Tensor] | None = None

    def logprobs(self, k: int) -> TokenLogprobs:
        """The target's log-probabilities of the draft and of its `k` first choices."""
        if self.found is not None:
            return self.found.first(k)
        assert self.hidden is not None and self.logits is not None
        ids = torch.tensor(list(self.draft), dtype=torch.long, device=self.hidden.device)
        return read_logprobs(self.hidden, ids, self.logits, k)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Validity of a draft at its cuts.

    Attributes:
        cuts: K token offsets in the draft.
        validity: K probabilities; validity[k] belongs to the prefix draft[:cuts[k]].
        is_greedy_choice: for each draft token whether it is the target's greedy choice; None if the judge read no
            log-probabilities, and for a block.
        scores: what a judge of single tokens carries into the next draft; None: it carries nothing.
        by_token: there is a cut after every token, so that the first rejected one is never the target's choice.
        unusual: the draft is out of the training distribution (`UsualDrafts`): only greedy matches are accepted.
    """

    cuts: list[int]
    validity: list[float]
    is_greedy_choice: list[bool] | None = None
    scores: TokenScores | None = None
    by_token: bool = False
    unusual: bool = False

    def facts(self) -> dict[str, Any]:
        """The fields by name, for a verdict that adds what its backend knows."""
        return {field.name: getattr(self, field.name) for field in fields(Verdict)}


class Scorer(Protocol):
    """A judge that is bound to one target.

    Attributes:
        k: number of the target's first choices that it reads; 0: it reads other states.
        by_token: it can judge every token of a block.
        first_tokens: draft tokens by which it tells whether it can judge an answer; 0: it always can.
        layers: optional; layers of which it reads the inputs, counted as in `Decoder.capture_hidden`.
        looks_ahead: optional; the verdict on a token depends on later tokens of its block (`looks_ahead`).
    """

    @property
    def k(self) -> int: ...

    @property
    def by_token(self) -> bool: ...

    @property
    def first_tokens(self) -> int: ...

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing | None:
        """Tokens to append to the pass over context and draft, whose states `reading` has not yet; None: no tokens."""
        ...

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        """Judge a draft.

        Args:
            carried: the state after the answer's last accepted draft token.
        """
        ...


def looks_ahead(scorer: Scorer | None) -> bool:
    """Whether verdicts depend on where a block ends, so that no measured time may end one under a promise."""
    return bool(getattr(scorer, "looks_ahead", False))


class Judge(Protocol):
    """A loaded judge: `ValidityAdapter`, `RuleJudge`, `FlooredJudge` or `ZeroShotJudge`."""

    config: ValidityConfig

    @property
    def tokens_per_cut(self) -> int:
        """Number of tokens that `Scorer.trailing` appends for each cut."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the judge."""
        ...

    def scorer(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: PreTrainedModel | None = None
    ) -> Scorer:
        """Bind the judge to a target; over servers there is no `model`."""
        ...


def token_verdict(
    reading: Reading, k: int, score: Callable[[TokenLogprobs], TokenScores], to_validity: Callable[[Tensor], Tensor]
) -> Verdict:
    """The verdict of a judge of tokens by log-probabilities, their own and those of the `k` first choices.

    Args:
        to_validity: converts logits to probabilities.
    """
    if not len(reading.draft):  # nothing is wrong before the first token
        return Verdict(cuts=list(reading.cuts or ()), validity=[1.0] * len(reading.cuts or ()))
    found = reading.logprobs(k)
    scores = score(found)
    validity, unusual = to_validity(scores.logits), scores.usual is False
    if reading.cuts is None:
        cuts = [*range(1, len(reading.draft) + 1)]
        return Verdict(cuts=cuts, validity=validity.tolist(), scores=scores, by_token=True, unusual=unusual)
    at = torch.tensor(list(reading.cuts), dtype=torch.long, device=validity.device)
    each = validity[(at - 1).clamp_min(0)].masked_fill(at == 0, 1.0)
    return Verdict(
        cuts=list(reading.cuts),
        validity=each.tolist(),
        is_greedy_choice=found.is_greedy_choice.tolist(),
        scores=scores,
        unusual=unusual,
    )
