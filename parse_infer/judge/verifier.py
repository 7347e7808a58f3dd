"""The verification pass: one forward of the target reads a draft, and the judge scores its cuts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from parse_infer.errors import ModelError
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Judge, Reading, Verdict
from parse_infer.judge.packed_check import check_packed_pass
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import Segmenter

_START = Carried()


@dataclass(frozen=True, kw_only=True)
class Verification(Verdict):
    """Verdict of one verification pass in this process.

    Attributes:
        hidden: [1 + len(draft), H]; row i is the target's final-norm state that predicts draft token i, and the last
            row predicts the token after the draft; [0, H] for an empty draft. `decoder.logits(hidden[cut])` resumes at
            a cut without a forward. The states of prompt and probes are freed.
        offsets: the rows that `compact` has kept in `hidden`; None: all rows.
    """

    hidden: Tensor
    offsets: list[int] | None = None

    def state(self, offset: int) -> Tensor:
        """Return the state at draft offset `offset`, [H]. Raise ValueError if `compact` has dropped the row."""
        return self.hidden[offset if self.offsets is None else self.offsets.index(offset)]

    def compact(self, offsets: Collection[int]) -> Verification:
        """Return a copy with these rows of `hidden` only, for storage."""
        kept = sorted(set(offsets))
        return replace(self, hidden=self.hidden[kept], offsets=kept)


class Verifier:
    """Makes one judge's readings with one decoder.

    Args:
        decoder: the target's decoder. Split attention is enabled on its model.
        judge: None allows only passes without cuts, as in mode "exact".
        segmenter: selects the cuts.

    Raises:
        ValueError: the target's architecture cannot run the packed pass exactly. The check runs once per model.

    Attributes:
        scorer: the judge of this target; None without a judge.
    """

    def __init__(self, decoder: Decoder, judge: Judge | None, segmenter: Segmenter) -> None:
        enable_split_attention(decoder.model)
        check_packed_pass(decoder.model)
        self.decoder, self.judge, self.segmenter = decoder, judge, segmenter
        self.scorer = None if judge is None else judge.scorer(segmenter.tokenizer, decoder.eos_ids, decoder.model)

    @torch.inference_mode()
    def verify(
        self,
        draft_ids: Sequence[int],
        cuts: Sequence[int] | None = None,
        carried: Carried = _START,
        written: Sequence[int] = (),
    ) -> Verification:
        """Judge a draft after the decoder's context, in one forward (several for a long text) and one device
        synchronisation.

        No forward runs for an empty draft. Otherwise the decoder's context becomes context + draft, fully cached.
        Resume with `decoder.seek(context + draft[:cut])` and `decoder.set_next_logits(decoder.logits(hidden[cut]))`.

        Args:
            draft_ids: draft in target tokens, its end token included.
            cuts: strictly increasing offsets in 0..len(draft); None takes the segmenter's cuts.
            carried: the judge's state after the answer's last accepted draft token.
            written: tokens that the target has written since.

        Raises:
            ValueError: cuts out of order or range, cuts without a judge, or an empty context.
        """
        cuts = self.segmenter.cuts(draft_ids) if cuts is None else list(cuts)
        if any(not 0 <= c <= len(draft_ids) for c in cuts) or any(b <= a for a, b in pairwise(cuts)):
            raise ModelError(f"cuts must increase strictly within 0..{len(draft_ids)}, not {cuts}")
        if self.scorer is None and cuts:
            raise ModelError("this verifier has no judge, so it can verify drafts without cuts only")
        if not draft_ids and not cuts:
            weight = cast(nn.Embedding, self.decoder.model.get_input_embeddings()).weight
            return Verification(cuts=[], validity=[], hidden=weight.new_empty(0, weight.shape[1]))
        return self._verify(draft_ids, cuts, carried, written)

    @torch.inference_mode()
    def verify_block(
        self, draft_ids: Sequence[int], carried: Carried = _START, written: Sequence[int] = ()
    ) -> Verification:
        """Judge every token of a block of at least one token, with a scorer that judges tokens (`Scorer.by_token`).

        The verdict on a token does not depend on where the blocks before it ended, and equals that of `verify`.
        """
        return self._verify(draft_ids, None, carried, written)

    def _verify(
        self, draft_ids: Sequence[int], cuts: list[int] | None, carried: Carried, written: Sequence[int]
    ) -> Verification:
        decoder, scorer = self.decoder, self.scorer
        if scorer is None or cuts == []:
            return Verification(cuts=[], validity=[], hidden=decoder.forward(draft_ids).hidden)
        reading = Reading(draft_ids, cuts, written, context=[*decoder.ids])
        trailing = scorer.trailing(reading, carried, decoder.device)
        output = decoder.forward(draft_ids, trailing, getattr(scorer, "layers", ()))
        hidden = output.hidden if trailing is None else output.hidden.clone()  # a view would keep the other states
        reading = replace(
            reading,
            hidden=hidden[:-1],
            inner=output.inner,
            logits=decoder.logits,
            trailing=None if trailing is None else output.trailing,
            read=lambda tokens: decoder.forward((), tokens).trailing,
        )
        return Verification(**scorer.score(reading, carried).facts(), hidden=hidden)

    @torch.inference_mode()
    def greedy_match(self, draft_ids: Sequence[int], verification: Verification, start: int = 0) -> int:
        """Count the draft tokens from `start` on that are the target's greedy choice, up to the first mismatch.

        No forward runs. If the judge read no log-probabilities, the output layer runs on growing chunks of hidden
        states, with one device synchronisation per chunk.
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
