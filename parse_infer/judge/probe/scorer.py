"""Scores drafts by the target's hidden states: probes behind the cuts, doubt about single tokens, or both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from parse_infer.errors import SettingsError
from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.judge import Reading, Verdict
from parse_infer.judge.probe.head import Probe, ReducedLMHead, TokenDoubt, ValidityHead, surprise
from parse_infer.judge.probe.lora import ProbeLoRA
from parse_infer.judge.probe.packing import probes, readout_index
from parse_infer.models.decoder import Trailing

NEGLIGIBLE_DOUBT = -10.0
"""A token below it counts as the target's own. It lowers a validity near 1 by less than 0.0001."""


class ProbeScorer:
    """A `Scorer` with a `ValidityHead`.

    Args:
        probe: the tokens of a probe; without ids the head uses token doubt alone.
        lora: applied to the probe's tokens.
        end_ids: the target's end tokens.
        model: the target.
        to_validity: converts logits to probabilities.
    """

    k, first_tokens = 0, 0

    def __init__(
        self,
        head: ValidityHead,
        probe: Probe,
        lora: ProbeLoRA | None,
        end_ids: Collection[int],
        model: PreTrainedModel,
        to_validity: Callable[[Tensor], Tensor],
    ) -> None:
        self._head, self._probe, self._lora, self._end_ids = head, probe, lora, end_ids
        self._to_validity = to_validity
        vocabulary = None if head.tokens is None else head.tokens.vocabulary
        self._part = None if vocabulary is None else ReducedLMHead.of(model, vocabulary)
        self._embeddings = cast(nn.Embedding, model.get_input_embeddings())

    @property
    def by_token(self) -> bool:
        return not self._probe.ids

    def check_blocks(self, block_tokens: int) -> None:
        """Refuse blocks with a probe and `TokenDoubt`: the bias was trained with both, and a block has no doubt about
        the tokens before it."""
        if self._probe.ids and self._head.tokens is not None:
            raise SettingsError(
                f"block_tokens is {block_tokens}, but this adapter's probe and token doubt were trained on whole "
                "drafts: set block_tokens to whole, or use an adapter without a probe"
            )

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing | None:
        if not self._probe.ids:
            return None
        draft, cuts, start = reading.draft, list(reading.cuts or ()), len(reading.context)
        visible = [start + cut - self._repeats_end(draft, cut) for cut in cuts]
        trailing = probes(self._probe.ids, visible, start + len(draft), device)
        if self._lora is None:
            return trailing
        return replace(trailing, within=partial(self._lora.applied, len(cuts) * len(self._probe.ids)))

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        return self._score_tokens(reading, carried) if reading.cuts is None else self._score_cuts(reading)

    def _score_tokens(self, reading: Reading, carried: Carried) -> Verdict:
        assert self._head.tokens is not None
        each, _ = self._doubt(self._head.tokens, reading)
        before_block = torch.tensor([carried.doubt], device=each.device)
        pooled = torch.cat([before_block, each]).logcumsumexp(0)[1:]
        scores = TokenScores(self._head.bias.float() - pooled, pooled)
        validity = self._to_validity(scores.logits).tolist()
        cuts = [*range(1, len(reading.draft) + 1)]
        return Verdict(cuts=cuts, validity=validity, scores=scores, by_token=True)

    def _score_cuts(self, reading: Reading) -> Verdict:
        cuts, tokens, states = list(reading.cuts or ()), self._head.tokens, None
        if reading.trailing is not None:
            states = reading.trailing[readout_index(len(cuts), len(self._probe.ids))]
        if tokens is None:
            return Verdict(cuts=cuts, validity=self._to_validity(self._head(states)).tolist())
        each, is_greedy_choice = self._doubt(tokens, reading)
        doubt = each.new_zeros(len(cuts))
        if len(reading.draft):
            doubt = TokenDoubt.pool_over_prefixes(each, torch.tensor(cuts, device=each.device))
        validity = self._to_validity(self._head(states, doubt))
        if is_greedy_choice is None:
            return Verdict(cuts=cuts, validity=validity.tolist())
        found = torch.cat([validity, is_greedy_choice.to(validity.dtype)]).tolist()  # one device synchronisation
        return Verdict(cuts=cuts, validity=found[: len(cuts)], is_greedy_choice=[v > 0 for v in found[len(cuts) :]])

    def _doubt(self, tokens: TokenDoubt, reading: Reading) -> tuple[Tensor, Tensor | None]:
        """Compute the doubt about each draft token, [T], from the states before the tokens. Also return whether each
        token is the target's greedy choice, [T], or None if unknown.

        Without a probe, the target's greedy choices add no doubt (-inf): the target would write the same."""
        before, logits = reading.hidden, reading.logits
        assert before is not None and logits is not None
        if not len(reading.draft):
            return before.new_zeros(0, dtype=torch.float32), None
        ids = torch.tensor(list(reading.draft), device=before.device)
        # Read the matrix directly: some embedding modules scale their output, and `TokenDoubt` normalises anyway.
        written = embedding(ids, self._embeddings.weight)
        found = surprise(before, ids, logits, self._part)
        each = tokens(before, written, found.features)
        if not self._probe.ids:
            choices = found.greedy_choices(before, ids, logits, each <= NEGLIGIBLE_DOUBT)
            each = each.masked_fill(choices, -torch.inf)
        return each, found.is_greedy_choice

    def _repeats_end(self, draft: Sequence[int], cut: int) -> int:
        """Return 1 if the prefix ends with an end token and the probe closes the turn too, else 0."""
        return int(self._probe.closes_turn and cut > 0 and draft[cut - 1] in self._end_ids)
