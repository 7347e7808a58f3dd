"""The `ModelPair` of one answer by models in this process: drafts are read into the target's cache."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence

from parse_infer.backends.local.written import written
from parse_infer.decoding.block_length import FIRST, BlockLength
from parse_infer.decoding.plan import Plan
from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.drafters.source import Block, DraftSource
from parse_infer.judge.verifier import Verification, Verifier
from parse_infer.models.devices import wait_for
from parse_infer.models.loading import LanguageModel
from parse_infer.request.request import Request
from parse_infer.token_drafters.proposer import TokenProposer
from parse_infer.token_drafters.rejected_draft import RejectedDraft


class LocalModelPair:
    """A `ModelPair` of models in this process. Its methods never suspend.

    Args:
        proposer: token drafter of the target.
        length: measures costs, and ends the blocks of `Plan.ends_early`.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        source: DraftSource,
        target: LanguageModel,
        verifier: Verifier,
        proposer: TokenProposer | None,
        length: BlockLength,
    ) -> None:
        self.plan, self.segmenter, self.drafted = plan, verifier.segmenter, 0
        self._request, self._source, self._target, self._verifier = request, source, target, verifier
        self._proposer, self._length = proposer, length
        self._first = FIRST if plan.streamed and plan.ends_early else None
        self._block = Block([])
        self._paused = False  # this round: the target writes alone

    def max_draft_tokens(self) -> int:
        """The remaining budget, or the window minus context and the tokens of one cut if that is less."""
        appended = self.segmenter.tokens_per_cut if self.plan.judged == "cut" else 0
        left = self._target.window - appended - len(self._request.context)
        return min(self._request.answer.remaining_tokens, left)

    async def propose(self, round: int) -> Sequence[int]:
        plan, answer, limit = self.plan, self._request.answer, self.max_draft_tokens()
        if not plan.drafts:
            return ()
        if plan.block is None:
            return self._source.propose(answer.ids, limit).ids
        self.drafted = 0
        # Of an unusual draft only the target's first choices are kept. So its greedy text does not depend on pauses.
        greedy = self._request.settings.resume_sampling.greedy
        pauses = plan.pauses or (plan.ends_early and greedy and self._request.fallback is not None)
        self._paused = pauses and self._length.pause > 0
        if self._paused:
            self._block = Block([])
            return ()
        if not isinstance(self._source, ModelDrafter):
            return self._source.propose(answer.ids, min(limit, plan.block)).ids
        longest = min(plan.block, self._length.longest) if plan.ends_early else plan.block
        ends = self._length.ending() if plan.ends_early else None
        self._block = self._source.propose_block(
            answer.ids, limit, min(self._first or longest, longest), ends, self._min_tokens()
        )
        self._first, self.drafted = None, self._block.n_drafted
        return self._block.ids

    def _min_tokens(self) -> int:
        """Target tokens that an answer's first block must have, so that the judge can tell whether it knows it."""
        scorer = self._verifier.scorer
        if scorer is None or self.plan.judged != "token" or not self.plan.ends_early:
            return 0
        return scorer.first_tokens if self._request.carried.usual is None else 0

    async def verify(self, draft: Sequence[int]) -> Verification:
        """Run one target forward over [uncached context, draft, probes]; context and draft stay in the cache."""
        request, verifier = self._request, self._verifier
        decoder, context, begin = self._target.decoder, request.context, time.perf_counter()
        decoder.reserve(len(context), request.answer.remaining_tokens + self.segmenter.max_appended_tokens)
        decoder.seek(context)
        self._read = len(context) - decoder.cached + len(draft)
        carried = request.carried
        since = request.answer.ids[carried.tokens :]
        if self.plan.judged is None:
            verdict = verifier.verify(draft, cuts=[])
            wait_for(decoder.device)  # the other verdicts have waited for their numbers
        elif draft and self.plan.judged == "token":
            verdict = verifier.verify_block(draft, carried, since)
        else:
            verdict = verifier.verify(draft, None, carried, since)
        self._read_s = time.perf_counter() - begin
        return verdict

    def count_greedy_matches(self, draft: Sequence[int], verdict: Verification, cut: int) -> int:
        # In a block, the first rejected token is never the target's choice.
        if verdict.by_token or not self.plan.keeps_greedy_match:
            return 0
        return self._verifier.greedy_match(draft, verdict, cut)

    def compact(self, verdict: Verification, kept: Collection[int]) -> Verification:
        return verdict.compact(kept)

    def commit(self, draft: Sequence[int], verdict: Verification, kept: int) -> None:
        """Crop the cache. The verification pass supplies the logits of the first resumed token."""
        decoder, block = self._target.decoder, self._block
        decoder.seek(self._request.context)
        if draft and not self.draft_continues(draft, kept, ()):
            decoder.set_next_logits(decoder.logits(verdict.state(kept)))
        if draft and self.plan.ends_early and block.seconds_per_token is not None:
            confidences = block.confidences[: len(draft)]
            draft_s = block.seconds_per_token * len(confidences)
            self._length.note(confidences, kept, kept < len(draft), draft_s, self._read_s, self._read)

    def draft_continues(self, draft: Sequence[int], kept: int, written: Sequence[int]) -> bool:
        if not (self.plan.continues and self.plan.drafts):
            return False
        if not draft and self.drafted:  # the block ended inside a character
            return len(written) >= 1
        if not draft:
            return self._paused and self._length.pause <= len(written)
        if kept == len(draft):
            return True
        if self.plan.after_rejection == "segment":
            return self.segmenter.first_segment_end(written) is not None
        return len(written) >= 1

    async def resume(self, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        request, proposer = self._request, self._proposer
        if self.plan.keeps_greedy_match:  # the rejected draft proposes tokens at no cost
            proposer = RejectedDraft(request.context, rejected, fallback=proposer)
        before, seconds = len(request.answer.ids), request.timings.resume_s
        try:
            # Each place has its own random numbers, so that an answer does not depend on where its blocks end.
            for token in written(self._target, request, proposer, "target", before):
                yield token
        finally:
            if self._paused:
                self._length.note_alone(request.timings.resume_s - seconds, len(request.answer.ids) - before)
