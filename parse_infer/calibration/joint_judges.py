"""Judges in joint decoding: one token of many answers at a time, with what each has to remember of its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parse_infer.errors import ModelError
from parse_infer.judge.floor import FlooredJudge
from parse_infer.judge.logprob_head import LogprobScorer, pool_doubt
from parse_infer.judge.rules.rule import RuleJudge, TokenRule
from parse_infer.judge.stream.scorer import StreamScorer
from parse_infer.judge.token_logprobs import TokenLogprobs, certain_features
from parse_infer.models.loading import LanguageModel

REJECTED = -1.0
"""The validity of a token that no threshold keeps."""

States = Callable[[Sequence[int]], Tensor]
"""The inputs of `JointJudge.layers` at the draft tokens of some of the answers, [n, layers, H]: another forward."""


@dataclass(frozen=True)
class Memory:
    """What a trained head knows of an answer so far, as in `Carried`.

    Attributes:
        doubt: pooled doubt about the accepted draft tokens.
        state: [width], the recurrent state.
        usual: whether the head can judge the drafts; else it keeps the target's own choices only.
    """

    doubt: float
    state: Tensor
    usual: bool


class JointJudge(ABC):
    """A judge of single tokens. Rules remember nothing: their memory is None.

    Attributes:
        k: number of the target's first choices that it reads.
        first_tokens: draft tokens by which it tells whether it can judge an answer; 0: it always can.
        layers: of the target, whose inputs it reads.
    """

    k: int
    first_tokens = 0
    layers: Sequence[int] = ()

    def usual(self, draft: TokenLogprobs) -> bool | None:
        """Whether the drafts of an answer with these first tokens can be judged; None: they are too few to tell."""
        return True

    def begin(self, usual: bool) -> Memory | None:
        """The memory of an answer without tokens."""
        return None

    @abstractmethod
    def judge(
        self, found: TokenLogprobs, memories: Sequence[Memory | None], inner: States
    ) -> tuple[list[float], Sequence[Memory | None]]:
        """The validity of N answers after one more draft token, and their memories if that is accepted."""
        ...

    def read(self, tokens: Sequence[int], memories: Sequence[Memory | None]) -> Sequence[Memory | None]:
        """The memories of N answers after one more token, which the target has written."""
        return memories


class _Rule(JointJudge):
    def __init__(self, rule: RuleJudge) -> None:
        self._rule, self.k = rule, rule.k

    def judge(
        self, found: TokenLogprobs, memories: Sequence[Memory | None], inner: States
    ) -> tuple[list[float], Sequence[Memory | None]]:
        return self._rule.validity_of_each(found).tolist(), memories


class _Head(JointJudge):
    """`LogprobScorer.token_scores` of one token, for many answers."""

    def __init__(self, scorer: LogprobScorer) -> None:
        self._scorer, self.k, self.first_tokens = scorer, scorer.k, scorer.first_tokens

    def usual(self, draft: TokenLogprobs) -> bool | None:
        known = self._scorer.usual
        return True if known is None else known.look(draft.first(self.k))[0]

    def begin(self, usual: bool) -> Memory:
        return Memory(-torch.inf, self._scorer.bias.new_zeros(self._scorer.head.config.width), usual)

    @torch.inference_mode()
    def judge(
        self, found: TokenLogprobs, memories: Sequence[Memory | None], inner: States
    ) -> tuple[list[float], Sequence[Memory | None]]:
        scorer, head, known = self._scorer, self._scorer.head, _known(memories)
        features, same = found.features[:, None], found.is_greedy_choice
        hidden, states = self._encode(features, found.ids, found.top_ids[:, 0], known)
        doubt = head.doubt(features, hidden)[:, 0].masked_fill(same, -torch.inf)
        doubt = self._corrected(doubt, hidden[:, 0], inner)
        before = doubt.new_tensor([memory.doubt for memory in known])
        pooled = pool_doubt(torch.stack([before, doubt], -1), head.config.sharpness)[:, 1]
        validity = scorer.to_validity(scorer.bias - pooled)
        unusual = torch.tensor([not memory.usual for memory in known], device=same.device)
        validity = torch.where(unusual, torch.where(same, 1.0, REJECTED), validity)
        after = [
            replace(memory, doubt=pool, state=state)
            for memory, pool, state in zip(known, pooled.tolist(), states, strict=True)
        ]
        return validity.tolist(), after

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], memories: Sequence[Memory | None]) -> Sequence[Memory | None]:
        known, device = _known(memories), self._scorer.bias.device
        ids = torch.tensor(list(tokens), device=device)
        features = certain_features(len(ids), self.k).to(device)[:, None]
        _, states = self._encode(features, ids, ids, known)
        return [replace(memory, state=state) for memory, state in zip(known, states, strict=True)]

    def _corrected(self, doubt: Tensor, hidden: Tensor, inner: States) -> Tensor:
        """Correct the doubt [N], of which the target's first choices are -inf, by what else the judge reads."""
        return doubt

    def _encode(
        self, features: Tensor, ids: Tensor, first: Tensor, memories: Sequence[Memory]
    ) -> tuple[Tensor, Tensor]:
        """What the head knows of each token, [N, 1, width], and the state after it, [N, width]."""
        before = torch.stack([memory.state for memory in memories])
        hidden, states = self._scorer.head.encode(features, ids[:, None], first[:, None], self._scorer.texts, before)
        return hidden, states[:, 0]


class _HiddenHead(_Head):
    """A head whose doubt hidden states correct."""

    def __init__(self, scorer: StreamScorer) -> None:
        super().__init__(scorer)
        self._stream, self.layers = scorer.stream, scorer.layers

    def _corrected(self, doubt: Tensor, hidden: Tensor, inner: States) -> Tensor:
        doubted = (doubt > self._stream.stream.floor).nonzero()[:, 0]
        if not len(doubted):
            return doubt
        every = torch.ones_like(doubted, dtype=torch.bool)
        corrected = self._stream.correct(doubt[doubted], hidden[doubted], inner(doubted.tolist()), every)
        return doubt.index_copy(0, doubted, corrected)


class _Floor(JointJudge):
    def __init__(self, judge: JointJudge, floor: TokenRule) -> None:
        self._judge, self._floor = judge, floor
        self.k, self.first_tokens, self.layers = max(judge.k, floor.k), judge.first_tokens, judge.layers

    def usual(self, draft: TokenLogprobs) -> bool | None:
        return self._judge.usual(draft)

    def begin(self, usual: bool) -> Memory | None:
        return self._judge.begin(usual)

    def judge(
        self, found: TokenLogprobs, memories: Sequence[Memory | None], inner: States
    ) -> tuple[list[float], Sequence[Memory | None]]:
        validity, after = self._judge.judge(found.first(self._judge.k), memories, inner)
        below = self._floor.is_below(found.first(self._floor.k)).tolist()
        return [min(own, 0.0) if under else own for own, under in zip(validity, below, strict=True)], after

    def read(self, tokens: Sequence[int], memories: Sequence[Memory | None]) -> Sequence[Memory | None]:
        return self._judge.read(tokens, memories)


def joint_judge(judge: object, target: LanguageModel) -> JointJudge:
    """The judge in joint decoding. Raises ValueError for one whose verdict on a token depends on other passes."""
    if isinstance(judge, FlooredJudge) and not judge.floor.looks_ahead:
        return _Floor(joint_judge(judge.adapter, target), judge.floor)
    if isinstance(judge, RuleJudge) and not judge.looks_ahead:
        return _Rule(judge)
    if hasattr(judge, "scorer") and not isinstance(judge, (FlooredJudge, RuleJudge)):
        scorer = judge.scorer(target.tokenizer, target.eos_ids, target.model)
        if type(scorer) is LogprobScorer:
            return _Head(scorer)
        if isinstance(scorer, StreamScorer) and scorer.lora is None:
            return _HiddenHead(scorer)
    raise ModelError("this judge looks ahead, or needs passes of its own")


def _known(memories: Sequence[Memory | None]) -> list[Memory]:
    return [memory for memory in memories if memory is not None]
