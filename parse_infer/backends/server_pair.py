"""The `ModelPair` of one answer over servers.

Steps overlap: the target prefills a long prompt while the draft is written, and `StreamingVerifier` verifies each
complete segment. A rejected segment ends the draft at once, unless the rest serves as speculative tokens. The
accepted text is the same as without overlap.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from parse_infer.backends.client import RequestRejected
from parse_infer.backends.local_draft import LocalDraft
from parse_infer.backends.logprob_reads import LogprobScores
from parse_infer.backends.replicas import ReplicaPool
from parse_infer.backends.retries import Failing, Lease, Replaced, Unavailable
from parse_infer.backends.server_target import Scores, Target, server_settings, stop_settings
from parse_infer.backends.streaming_verifier import StreamingVerifier
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft, DraftStream
from parse_infer.drafters.text import TextDrafter
from parse_infer.output import Fallback
from parse_infer.request import Request

log = logging.getLogger("parse_infer.backends")

DRAFT_SILENCE_S = 30.0  # without a draft token; then the target alone is faster
PREFILL = 256  # prompt tokens from which a prefill request during drafting pays off

Drafts = tuple[ReplicaPool | LocalDraft, CrossTokenizerDraft] | TextDrafter
"""Source of drafts: a draft model with its tokenizer mapping, or a text."""


class ServerModelPair:
    """The `ModelPair` of one request over servers.

    Args:
        drafts: source of drafts.
        threshold: the request's threshold.
        at, draft_at: leases of the replicas for this request.
        overlap: verify while the draft is written.
        watched: see `Target.written`.
        falls_back: if the draft or the judge fails, the target writes the rest of the answer (`Request.fallback`).
            False: raise the error.
    """

    def __init__(
        self,
        target: Target,
        drafts: Drafts,
        request: Request,
        threshold: float,
        at: Lease,
        draft_at: Lease | None = None,
        overlap: bool = True,
        watched: bool = True,
        falls_back: bool = True,
    ) -> None:
        self.segmenter = target.segmenter
        self.threshold = threshold
        self._target, self._drafts, self._request = target, drafts, request
        self._overlap = overlap and target.reads is None  # a read costs as much for a part of the draft
        self._falls_back = falls_back
        length = request.settings.block_tokens
        of_model = threshold <= 1 and not isinstance(drafts, TextDrafter)
        in_blocks = isinstance(length, int) and of_model
        self._by_token = target.reads is not None and of_model and length != "whole"
        self._choice: int | None = None  # the target's own token after the accepted ones, if a read has shown it
        self._blocks = length if isinstance(length, int) and in_blocks else None
        # In blocks, and before the first draft, the target's stream ends early.
        self._watched = watched or in_blocks or self._by_token or request.settings.strict_tokens > 0
        self._drafted = 0  # draft tokens of the last block; it has none for the target if it ends inside a character
        self._at, self._draft_at = at, draft_at
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prefill: asyncio.Task[None] | None = None
        self._verifier = self._new_verifier(round=1)

    def max_draft_tokens(self) -> int:
        reads, context = self._target.reads, len(self._request.context)
        room = self._target.language.window - context
        if reads is not None:
            unread = min(context, PREFILL) if self._at.server.reads_cache else context
            room = min(room, reads.max_tokens - unread)
        behind = max(0, room - self._target.probe_room)
        return min(self._request.answer.remaining_tokens, behind, self._blocks or behind)

    async def propose(self, round: int) -> Sequence[int]:
        request, servers, self._drafted = self._request, self._target.servers, 0
        if request.fallback is not None or not self._target.uses_draft(self.threshold):
            return []
        if not self.max_draft_tokens():
            return []
        if not servers.can_judge:
            return self._fall_back(servers.replaced())
        self._verifier = verifier = self._new_verifier(round)
        if isinstance(self._drafts, TextDrafter):
            return self._drafts.propose(request.answer.ids, self.max_draft_tokens()).ids
        writing = self._drafts[1].begin(request.answer.ids, self.max_draft_tokens())
        if writing is None:
            return []
        if (self._overlap or self._at.server.reads_cache) and round == 1 and len(request.context) >= PREFILL:
            self._prefill = self._start(self._read_prompt(list(request.context)))
        reading = self._start(self._read_draft(*self._drafts, writing, round))
        verifier.stop = reading.cancel
        await asyncio.wait([reading])
        request.stats.draft_forwards += writing.n
        self._drafted = writing.n
        if verifier.failure is not None:
            return self._fall_back(verifier.failure)
        if verifier.rejected_at is not None:
            return verifier.draft[: verifier.rejected_at]
        try:
            await reading
        except RequestRejected as error:
            return self._fall_back(error, "draft_refused")
        except Unavailable as error:
            return self._fall_back(error, "no_draft")
        return writing.draft().ids

    async def verify(self, draft: Sequence[int]) -> Scores | LogprobScores:
        if self._target.reads is not None:
            return await self._read(draft)
        cuts = self._target.affordable(self._request.context, self.segmenter.cuts(draft))
        try:
            return Scores(cuts, await self._verifier.of(draft, cuts) if cuts else [])
        except (ValueError, Failing) as error:
            self._fall_back(error)
            return Scores([], [])

    async def _read(self, draft: Sequence[int]) -> Scores | LogprobScores:
        if not draft:
            return Scores([], [])
        request = self._request
        request.stats.target_forwards += 1
        cuts, carried = None if self._by_token else self.segmenter.cuts(draft), request.carried
        written = request.answer.ids[carried.tokens :]
        if self._prefill is not None:
            await self._prefill
        try:
            return await self._target.read(request.context, draft, cuts, carried, written, self._at)
        except (ValueError, Failing) as error:
            self._fall_back(error)
            return Scores([], [])

    def count_greedy_matches(self, draft: Sequence[int], verdict: Scores | LogprobScores, cut: int) -> int:
        settings = self._request.settings
        if not isinstance(verdict, LogprobScores) or verdict.scores is not None:
            return 0  # without a read, the target's choices would cost one response per token
        if not (settings.keep_greedy_match and settings.resume_sampling.greedy):
            return 0
        matches = (own == id for own, id in zip(verdict.choices[cut:], draft[cut:], strict=True))
        return sum(1 for _ in itertools.takewhile(bool, matches))

    def compact(self, verdict: Scores | LogprobScores, kept: Collection[int]) -> Scores | LogprobScores:
        return verdict

    def commit(self, draft: Sequence[int], verdict: Scores | LogprobScores, kept: int) -> None:
        # The next prompt holds all state, and the server has its prefix blocks cached.
        request = self._request
        known = isinstance(verdict, LogprobScores) and kept < len(draft)
        if known and request.settings.resume_sampling.greedy and not request.answer.required:
            assert isinstance(verdict, LogprobScores)
            self._choice = verdict.choices[kept]
        else:
            self._choice = None

    async def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        if self._choice is not None:
            yield self._choice
        async with aclosing(self._target.written(self._request, round, self._at, self._watched)) as tokens:
            async for token in tokens:
                self._request.stats.target_forwards += 1
                yield token

    def draft_continues(self, draft: Sequence[int], kept: int, written: Sequence[int]) -> bool:
        if (self._blocks is None and not self._by_token) or not (draft or self._drafted):
            return False
        if not draft or (self._by_token and kept < len(draft)):
            return len(written) >= 1
        return kept == len(draft) or self.segmenter.first_segment_end(written) is not None

    async def close(self) -> None:
        """Cancel all pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fall_back(self, error: Exception, reason: Fallback | None = None) -> list[int]:
        """Let the target write the rest. Raises the error if fallback is off or no target server answers.

        Args:
            reason: None: the judge failed.
        """
        gone = reason is None and isinstance(error, Unavailable) and not isinstance(error, Failing)
        if gone or not self._falls_back:
            raise error
        if reason is None:
            reason = "judge_replaced" if isinstance(error, Replaced) else "judge_failed"
        self._request.fallback = reason
        # The server's own message may quote the request, so it stays out of the log.
        why = f"a request was rejected ({error.status})" if isinstance(error, RequestRejected) else error
        log.warning("the target answers without a draft (%s): %s", reason, why)
        return []

    def _new_verifier(self, round: int) -> StreamingVerifier:
        context = self._request.context
        settings = self._request.settings

        async def ask(draft: Sequence[int], cuts: Sequence[int]) -> list[float]:
            self._request.stats.target_forwards += 1
            return await self._target.validities(context, draft, cuts, self._at)

        # If the target writes all the rest, a rejected draft continues: it supplies speculative tokens.
        breaks = settings.acceptance == "first_failure" and (self._blocks is not None or not self._target.speculates)
        threshold = self.threshold if breaks else None
        choose = partial(self._target.affordable, context, singly=True)
        return StreamingVerifier(ask, self.segmenter, choose, threshold, self._start)

    async def _read_draft(
        self, servers: ReplicaPool | LocalDraft, translation: CrossTokenizerDraft, writing: DraftStream, round: int
    ) -> None:
        asked = server_settings(self._request.settings.draft_sampling, translation.end_ids, "draft", round)
        if not self._overlap:  # only the whole draft is used
            asked |= stop_settings(translation.stop)
        written = servers.written(writing.context, writing.remaining_tokens, asked, self._draft_at, self._overlap)
        # Without overlap, the whole draft comes at once, which may take long.
        limit = DRAFT_SILENCE_S if self._overlap and self._falls_back else None
        async with aclosing(written) as pieces:
            while (piece := await _next_piece(pieces, limit)) is not None:
                writing.add(piece)
                if writing.is_finished:
                    return
                if self._overlap:
                    self._verifier.update(writing.text, writing.n, lambda: writing.draft().ids)

    async def _read_prompt(self, context: list[int]) -> None:
        with suppress(ValueError, Unavailable):  # later requests report the error
            await self._target.prefill(context, self._at)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task


async def _next_piece(pieces: AsyncGenerator[list[int], None], limit_s: float | None) -> list[int] | None:
    """The next piece, or None at the end. Raises Unavailable after `limit_s` without a piece."""
    try:
        async with asyncio.timeout(limit_s):
            return await anext(pieces, None)
    except TimeoutError as error:
        raise Unavailable(f"the draft server sent no token for {limit_s:g} s") from error
