"""The verification pass: one forward of the target computes the validity of a draft at every cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from parse_infer.errors import ModelError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import LogprobHead, TokenScores
from parse_infer.judge.min_p import MinPScorer, TokenScorer, token_scorer
from parse_infer.judge.probe.head import Probe, ReducedLMHead, TokenDoubt, ValidityHead, surprise
from parse_infer.judge.probe.lora import ProbeLoRA
from parse_infer.judge.probe.packing import probes, readout_index
from parse_infer.judge.token_logprobs import read_logprobs
from parse_infer.models.architecture import text_config
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import Segmenter

_START = Carried()
NEGLIGIBLE_DOUBT = -10.0
"""A token below it counts as the target's own. It lowers a validity near 1 by less than 0.0001."""


class Judge(Protocol):
    """Interface of `ValidityAdapter`, `MinPJudge` and `ZeroShotJudge`."""

    config: ValidityConfig
    lora: ProbeLoRA | None

    @property
    def head(self) -> ValidityHead | LogprobHead | MinPScorer: ...

    @property
    def probe(self) -> Probe: ...

    @property
    def fingerprint(self) -> str:
        """Identifies the judge."""
        ...


@dataclass(frozen=True)
class Verification:
    """Result of one verification pass.

    Attributes:
        cuts: K token offsets in the draft.
        validity: K probabilities; validity[k] belongs to the prefix draft[:cuts[k]].
        hidden: [1 + len(draft), H]; row i is the target's final-norm state that predicts draft token i, and the last
            row predicts the token after the draft; [0, H] for an empty draft. `decoder.logits(hidden[cut])` resumes at
            a cut without a forward. The tensor is a copy, so the states of prompt and probes are freed.
        is_greedy_choice: for each draft token whether it is the target's greedy choice; None if the pass did not
            compute it.
        offsets: the rows that `compact` has kept in `hidden`; None: all rows.
        scores: the result of a judge of single tokens on each of them, for the next draft of the answer; else None.
        by_token: there is a cut after every token, and the first rejected one is never the target's choice.
        unusual: the judge knows no such drafts (`UsualDrafts`), and accepts only what the target would write itself.
    """

    cuts: list[int]
    validity: list[float]
    hidden: Tensor
    is_greedy_choice: list[bool] | None = None
    offsets: list[int] | None = None
    scores: TokenScores | None = None
    unusual: bool = False
    by_token: bool = False

    def state(self, offset: int) -> Tensor:
        """Return the state at draft offset `offset`, [H]. Raise ValueError if `compact` has dropped the row."""
        return self.hidden[offset if self.offsets is None else self.offsets.index(offset)]

    def compact(self, offsets: Collection[int]) -> Verification:
        """Return a copy with these rows of `hidden` only, for storage."""
        kept = sorted(set(offsets))
        return replace(self, hidden=self.hidden[kept], offsets=kept)


class Verifier:
    """Runs verification passes with one decoder and one judge.

    Args:
        decoder: the target's decoder. Split attention is enabled on its model.
        judge: adapter or zero-shot judge; None allows only passes without cuts, as in mode "exact".
        segmenter: selects the cuts.

    Raises:
        ValueError: the target's architecture cannot run the packed pass exactly. The check runs once per model.
    """

    def __init__(self, decoder: Decoder, judge: Judge | None, segmenter: Segmenter) -> None:
        enable_split_attention(decoder.model)
        _check_packed_pass(decoder.model)
        self.decoder = decoder
        self.judge = judge
        self.segmenter = segmenter
        self._probe = Probe((), "") if judge is None else judge.probe
        tokens = None if judge is None else judge.head.tokens
        self._logprobs: TokenScorer | None = None
        if judge is not None and not isinstance(judge.head, ValidityHead):
            self._logprobs = token_scorer(judge.config, judge.head, segmenter.tokenizer, decoder.eos_ids)
        vocabulary = None if tokens is None else tokens.vocabulary
        self._part = None if vocabulary is None else ReducedLMHead.of(decoder.model, vocabulary)
        self._embeddings = cast(nn.Embedding, decoder.model.get_input_embeddings())

    @torch.inference_mode()
    def verify(
        self,
        draft_ids: Sequence[int],
        cuts: Sequence[int] | None = None,
        carried: Carried = _START,
        written: Sequence[int] = (),
    ) -> Verification:
        """Score a draft after the decoder's context, in one forward (several for a long text) and one device
        synchronisation.

        No forward runs for an empty draft. Otherwise the decoder's context becomes context + draft, fully cached.
        Resume with `decoder.seek(context + draft[:cut])` and `decoder.set_next_logits(decoder.logits(hidden[cut]))`.

        Args:
            draft_ids: draft in target tokens, its end token included.
            cuts: strictly increasing offsets in 0..len(draft); None takes the segmenter's cuts.
            carried, written: as in `verify_block`, for a head on log-probabilities.

        Raises:
            ValueError: cuts out of order or range, cuts without a judge, or an empty context.
        """
        cuts = self.segmenter.cuts(draft_ids) if cuts is None else list(cuts)
        if any(not 0 <= c <= len(draft_ids) for c in cuts) or any(b <= a for a, b in pairwise(cuts)):
            raise ModelError(f"cuts must increase strictly within 0..{len(draft_ids)}, not {cuts}")
        judge = self.judge
        if judge is None and cuts:
            raise ModelError("this verifier has no judge, so it can verify drafts without cuts only")
        if not draft_ids and not cuts:
            return Verification([], [], self._embeddings.weight.new_empty(0, self._embeddings.weight.shape[1]))
        start = len(self.decoder.ids)
        visible = [start + cut - self._repeats_end(draft_ids, cut) for cut in cuts]
        probed = len(cuts) * len(self._probe.ids)
        lora = None if judge is None else judge.lora
        trailing = probes(self._probe.ids, visible, start + len(draft_ids), self.decoder.device) if probed else None
        if trailing is not None and lora is not None:
            trailing = replace(trailing, within=partial(lora.applied, probed))
        output = self.decoder.forward(draft_ids, trailing)
        hidden = output.hidden.clone()  # a view would keep the probes' states in memory
        if judge is None or not cuts:
            return Verification(cuts, [], hidden)
        if self._logprobs is not None and draft_ids:
            scores, is_choice = self._scores(draft_ids, hidden[:-1], carried, written)
            at = torch.tensor(cuts, device=hidden.device)
            validity = judge.config.validity(scores.logits)[(at - 1).clamp_min(0)].masked_fill(at == 0, 1.0)
            choices, unusual = is_choice.tolist(), scores.usual is False
            return Verification(cuts, validity.tolist(), hidden, choices, scores=scores, unusual=unusual)
        if self._logprobs is not None:
            return Verification(cuts, [1.0] * len(cuts), hidden)
        assert isinstance(judge.head, ValidityHead)
        states = output.trailing[readout_index(len(cuts), len(self._probe.ids))] if probed else None
        tokens = judge.head.tokens
        if tokens is None:
            return Verification(cuts, judge.config.validity(judge.head(states)).tolist(), hidden)
        each, is_greedy_choice = self._doubt(tokens, draft_ids, hidden[:-1])
        doubt = each.new_zeros(len(cuts))
        if draft_ids:
            doubt = TokenDoubt.pool_over_prefixes(each, torch.tensor(cuts, device=hidden.device))
        validity = judge.config.validity(judge.head(states, doubt))
        if is_greedy_choice is None:
            return Verification(cuts, validity.tolist(), hidden)
        found = torch.cat([validity, is_greedy_choice.to(validity.dtype)]).tolist()
        return Verification(cuts, found[: len(cuts)], hidden, [value > 0 for value in found[len(cuts) :]])

    @property
    def first_tokens(self) -> int:
        """See `LogprobJudge.first_tokens`; 0 for other judges."""
        return 0 if self._logprobs is None else self._logprobs.first_tokens

    @property
    def judges_tokens(self) -> bool:
        """Whether the judge scores each token of a block: a head on log-probabilities, or `TokenDoubt` alone."""
        if self.judge is None or self._probe.ids:
            return False
        return self._logprobs is not None or self.judge.head.tokens is not None

    @property
    def needs_whole_drafts(self) -> bool:
        """Whether the judge has a probe and `TokenDoubt`. Its bias was trained with both, and a block has no doubt
        about the tokens before it."""
        return self.judge is not None and bool(self._probe.ids) and self.judge.head.tokens is not None

    @torch.inference_mode()
    def verify_block(
        self, draft_ids: Sequence[int], carried: Carried = _START, written: Sequence[int] = ()
    ) -> Verification:
        """Score every token of a block after the decoder's context in one forward, if `judges_tokens`.

        The verdict on a token does not depend on where the blocks before it ended, and equals that of `verify`.

        Args:
            draft_ids: n >= 1 tokens.
            carried: `Verification.carried` of the last block with an accepted token.
            written: tokens that the target has written since.

        Returns:
            A verification with n cuts, one after each token.
        """
        judge = self.judge
        assert judge is not None
        hidden = self.decoder.forward(draft_ids).hidden
        if self._logprobs is not None:
            scores, _ = self._scores(draft_ids, hidden[:-1], carried, written)
            validity = judge.config.validity(scores.logits).tolist()
            cuts, unusual = [*range(1, len(draft_ids) + 1)], scores.usual is False
            return Verification(cuts, validity, hidden, scores=scores, unusual=unusual, by_token=True)
        assert isinstance(judge.head, ValidityHead) and judge.head.tokens is not None
        each, _ = self._doubt(judge.head.tokens, draft_ids, hidden[:-1])
        before_block = torch.tensor([carried.doubt], device=hidden.device)
        pooled = torch.cat([before_block, each]).logcumsumexp(0)[1:]
        scores = TokenScores(judge.head.bias.float() - pooled, pooled)
        validity = judge.config.validity(scores.logits).tolist()
        return Verification([*range(1, len(draft_ids) + 1)], validity, hidden, scores=scores, by_token=True)

    def _scores(
        self, draft_ids: Sequence[int], before: Tensor, carried: Carried, written: Sequence[int] = ()
    ) -> tuple[TokenScores, Tensor]:
        """Score tokens by their log-probabilities, from the states before them. Also return whether each is the
        target's greedy choice."""
        assert self._logprobs is not None
        ids = torch.tensor(draft_ids, device=before.device)
        found = read_logprobs(before, ids, self.decoder.logits, self._logprobs.k)
        return self._logprobs.score(found, carried, written), found.is_greedy_choice

    def _doubt(self, tokens: TokenDoubt, draft_ids: Sequence[int], before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the doubt about each draft token, [T], from the states [T, H] before the tokens. Also return whether
        each token is the target's greedy choice, [T], or None if unknown.

        Without a probe, the target's greedy choices add no doubt (-inf): the target would write the same."""
        if not draft_ids:
            return before.new_zeros(0, dtype=torch.float32), None
        ids = torch.tensor(draft_ids, device=before.device)
        # Read the matrix directly: some embedding modules scale their output, and `TokenDoubt` normalises anyway.
        written = embedding(ids, self._embeddings.weight)
        found = surprise(before, ids, self.decoder.logits, self._part)
        each = tokens(before, written, found.features)
        if not self._probe.ids:
            choices = found.greedy_choices(before, ids, self.decoder.logits, each <= NEGLIGIBLE_DOUBT)
            each = each.masked_fill(choices, -torch.inf)
        return each, found.is_greedy_choice

    @torch.inference_mode()
    def greedy_match(self, draft_ids: Sequence[int], verification: Verification, start: int = 0) -> int:
        """Count the draft tokens from `start` on that are the target's greedy choice, up to the first mismatch.

        No forward runs. Without `is_greedy_choice` (no `TokenDoubt`, or a reduced vocabulary), the output layer runs
        on growing chunks of hidden states, with one device synchronisation per chunk.
        """
        if verification.is_greedy_choice is not None:
            following = verification.is_greedy_choice[start:]
            return following.index(False) if False in following else len(following)
        position, chunk = start, 8
        while position < len(draft_ids):
            stop = min(position + chunk, len(draft_ids))
            own = self.decoder.logits(verification.hidden[position:stop]).argmax(-1).tolist()
            for i, token in enumerate(own):
                if token != draft_ids[position + i]:
                    return position + i - start
            position, chunk = stop, 2 * chunk
        return position - start

    def _repeats_end(self, draft_ids: Sequence[int], cut: int) -> int:
        """Return 1 if the prefix ends with an end token and the probe closes the turn too, else 0."""
        return int(self._probe.closes_turn and cut > 0 and draft_ids[cut - 1] in self.decoder.eos_ids)


_checked: WeakSet[PreTrainedModel] = WeakSet()


def _check_packed_pass(model: PreTrainedModel) -> None:
    """Compare two packed probes with two separate passes; raise ValueError if the results differ.

    Some architectures derive positions from the order of tokens (ALiBi, learnt offsets) and would be silently wrong.
    """
    if model in _checked:
        return
    size = text_config(model).vocab_size
    tokens = [i % size for i in (1, 2, 3, 5, 7, 11, 13, 17)]
    context, draft, probe = tokens[:3], tokens[3:6], tokens[6:]
    packed = Decoder(model, ())
    packed.seek(context)
    output = packed.forward(draft, probes(probe, [4, 6], 6, model.device))
    with torch.inference_mode():
        pairs = [(packed.logits(output.hidden[-1]), _last_logits(model, context + draft))]
        states = output.trailing[readout_index(2, len(probe))]
        for row, visible in enumerate((4, 6)):
            pairs.append((packed.logits(states[row]), _last_logits(model, (context + draft)[:visible] + probe)))
    limit = 1e-3 if model.dtype == torch.float32 else 0.1
    for ours, own in pairs:
        difference = (ours.float() - own.float()).norm() / own.float().norm().clamp_min(1e-6)
        if not difference <= limit:
            raise ModelError(
                f"{type(model).__name__} gives other results for packed probes than for separate ones (relative "
                f"difference {difference:.1e}): its positions do not follow position_ids; choose another target"
            )
    _checked.add(model)


def _last_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
