"""The `ModelPair` of one answer by models in this process: drafts in blocks or whole, read into the target's cache."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import TYPE_CHECKING

from parse_infer.decoding.block_length import FIRST, LONGEST, REPLAYED, threshold_class
from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.drafters.source import Block, DraftSource
from parse_infer.drafters.text import TextDrafter
from parse_infer.judge.verifier import Verification
from parse_infer.models.devices import wait_for
from parse_infer.request.request import Request
from parse_infer.settings.generation import BlockTokens
from parse_infer.speculation.rejected_draft import RejectedDraft

if TYPE_CHECKING:
    from parse_infer.backends.local.backend import LocalBackend


class LocalModelPair:
    """A `ModelPair` of models in this process. Its methods never suspend.

    Args:
        watched: somebody waits for the first text, so with "auto" the first block is short.
        replayed: a wrapper reuses parts of this answer under other settings. With "auto" all blocks then have one
            length.
    """

    def __init__(
        self,
        backend: LocalBackend,
        request: Request,
        drafter: DraftSource,
        watched: bool = False,
        replayed: bool = False,
    ) -> None:
        settings = request.settings
        self.segmenter = backend.segmenter
        assert settings.threshold is not None
        self.threshold = settings.threshold
        self._backend, self._request, self._drafter = backend, request, drafter
        self._exact = settings.mode == "exact"
        # Whether to accept draft tokens after the cut that equal the target's greedy choice.
        self._wants_tail = settings.keeps_greedy_match
        no_judge = self._exact or self.threshold > 1
        # A calibration knows no pauses, which change a judged answer.
        self._pauses = no_judge or (settings.risk is None and settings.adaptive is not False)
        self._probe_tokens = 0 if self._exact else backend.probe_tokens
        self._drafts = backend.uses_draft(request, drafter)
        self._by_segment = isinstance(drafter, ModelDrafter) and drafter.one_segment
        self._blocks: int | None = None  # longest block
        self._ends_early = False
        whole = self._by_segment or isinstance(drafter, TextDrafter)
        if not whole and (self._wants_tail or not no_judge):
            self._blocks, self._ends_early = self._block_length(settings.block_tokens, no_judge, replayed)
        if self._drafts and not self._by_segment:
            request.stats.block_tokens = "auto" if self._ends_early else self._blocks or "whole"
        self._judges_tokens = self._blocks is not None and not no_judge and backend.verifier.judges_tokens
        self._judges_segments = not no_judge and not backend.verifier.judges_tokens
        self._length = backend.block_lengths[threshold_class(2.0 if no_judge else self.threshold)]
        self._first = FIRST if watched and self._ends_early else None
        self._block = Block([])
        self.drafted = 0
        self._paused = False  # this round: the target writes alone

    def _block_length(self, length: BlockTokens, no_judge: bool, replayed: bool) -> tuple[int | None, bool]:
        """Return the longest block (None: whole drafts), and whether it may end earlier."""
        if isinstance(length, int):
            return length, False
        # A judge of segments may reject again and again what the draft model writes behind its own rejected tokens.
        by_token = isinstance(self._drafter, ModelDrafter) and (no_judge or self._backend.verifier.judges_tokens)
        if length == "whole" or not by_token:
            return None, False
        return (REPLAYED, False) if replayed else (LONGEST, True)

    def max_draft_tokens(self) -> int:
        """The remaining budget, or the window minus context and one probe if that is less."""
        left = self._backend.target.window - self._probe_tokens - len(self._request.context)
        return min(self._request.answer.remaining_tokens, left)

    async def propose(self, round: int) -> Sequence[int]:
        if not self._drafts:
            return ()
        answer, most = self._request.answer, self.max_draft_tokens()
        if self._blocks is None:
            return self._drafter.propose(answer.ids, most).ids
        self.drafted = 0
        # Of an unusual draft only the target's own tokens are kept.
        pauses = self._pauses or self._request.fallback is not None
        self._paused = pauses and self._ends_early and self._length.pause > 0
        if self._paused:
            self._block = Block([])
            return ()
        if not isinstance(self._drafter, ModelDrafter):
            return self._drafter.propose(answer.ids, min(most, self._blocks)).ids
        survival = 1.0
        unknown = self._ends_early and self._judges_tokens and self._request.carried.usual is None
        least = self._backend.verifier.first_tokens if unknown else 0

        def ends(confidence: float) -> bool:
            nonlocal survival
            survival *= self._length.survival_of(confidence)
            return self._ends_early and self._length.end_after(survival)

        longest = min(self._blocks, self._length.longest) if self._ends_early else self._blocks
        longest = min(self._first or longest, longest)
        self._block = self._drafter.propose_block(answer.ids, most, longest, ends, least)
        self._first, self.drafted = None, self._block.n_drafted
        return self._block.ids

    async def verify(self, draft: Sequence[int]) -> Verification:
        """Run one target forward over [uncached context, draft, probes]; context and draft stay in the cache."""
        decoder, context = self._backend.target.decoder, self._request.context
        verifier, begin = self._backend.verifier, time.perf_counter()
        probes = self._probe_tokens * self.segmenter.policy.max_cuts
        decoder.reserve(len(context), self._request.answer.remaining_tokens + probes)
        decoder.seek(context)
        self._read = len(context) - decoder.cached + len(draft)
        if self._exact or (self.threshold > 1 and (self._blocks is not None or verifier.judge is None)):
            verdict = verifier.verify(draft, cuts=[])
            wait_for(decoder.device)  # the other verdicts have waited for their numbers
        elif draft and self._judges_tokens:
            carried = self._request.carried
            verdict = verifier.verify_block(draft, carried, self._request.answer.ids[carried.tokens :])
        else:
            carried = self._request.carried
            verdict = verifier.verify(draft, None, carried, self._request.answer.ids[carried.tokens :])
        self._read_s = time.perf_counter() - begin
        return verdict

    def count_greedy_matches(self, draft: Sequence[int], verdict: Verification, cut: int) -> int:
        # In a block, the first rejected token is never the target's choice.
        wanted = self._wants_tail and not verdict.by_token
        return self._backend.verifier.greedy_match(draft, verdict, cut) if wanted else 0

    def compact(self, verdict: Verification, kept: Collection[int]) -> Verification:
        return verdict.compact(kept)

    def commit(self, draft: Sequence[int], verdict: Verification, kept: int) -> None:
        """Crop the cache. The verification pass supplies the logits of the first resumed token."""
        decoder = self._backend.target.decoder
        decoder.seek(self._request.context)
        if draft and not self.draft_continues(draft, kept, ()):
            decoder.set_next_logits(decoder.logits(verdict.state(kept)))
        if not draft or self._blocks is None:
            return
        block = self._block
        confidences = block.confidences[: len(draft)]
        if self._ends_early and block.seconds_per_token is not None:
            draft_s = block.seconds_per_token * len(confidences)
            self._length.note(confidences, kept, kept < len(draft), draft_s, self._read_s, self._read)

    def draft_continues(self, draft: Sequence[int], kept: int, written: Sequence[int]) -> bool:
        if not (self._by_segment or (self._blocks is not None and self._drafts)):
            return False
        if not draft and self.drafted:  # the block ended inside a character
            return len(written) >= 1
        if not draft:
            return self._paused and self._length.pause <= len(written)
        if kept == len(draft):
            return True
        if self._by_segment or self._judges_segments:  # the judge knows only that the segment fails
            return self.segmenter.first_segment_end(written) is not None
        return len(written) >= 1

    async def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        request, proposer = self._request, self._backend.target_drafter
        if self._wants_tail:  # the rejected draft proposes tokens at no cost
            proposer = RejectedDraft(request.context, rejected, fallback=proposer)
        # Random numbers of each place, so that an answer does not depend on where its blocks end.
        seeded = round if self._blocks is None else len(request.answer.ids)
        before, seconds = len(request.answer.ids), request.timings.resume_s
        try:
            for token in self._backend.decode(self._backend.target, request, proposer, "target", seeded):
                yield token
        finally:
            if self._paused:
                self._length.note_alone(request.timings.resume_s - seconds, len(request.answer.ids) - before)
