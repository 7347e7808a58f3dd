"""The `ModelPair` of one answer over servers.

The target prefills a long prompt while the draft is written.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from parse_infer.backends.pool.client import RequestRejected
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import Failing, Lease, Unavailable
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.logprob_reads import ServerVerdict
from parse_infer.backends.servers.target import Target, server_settings
from parse_infer.backends.servers.text_draft import CHAT, TextDraft, TextStream, read_chunk
from parse_infer.decoding.block_length import BlockLength
from parse_infer.decoding.plan import Plan, SourceKind
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft, DraftStream
from parse_infer.drafters.text import TextDrafter
from parse_infer.judge.judge import Verdict
from parse_infer.request.output import Fallback
from parse_infer.request.request import Request

log = logging.getLogger("parse_infer.backends")

DRAFT_SILENCE_S = 4.0  # without a draft token; then the target alone is faster
_MEASURED_SILENCE_S = 600.0  # where drafts are measured, a silent server is an error
PREFILL = 256  # prompt tokens from which a prefill request during drafting pays off

Drafts = tuple[ReplicaPool | InProcessDraft, CrossTokenizerDraft] | tuple[ReplicaPool, TextDraft] | TextDrafter
"""Source of drafts: a draft model with its tokenizer mapping, a server of texts, or a text."""


def source_kind(source: Drafts) -> SourceKind:
    if isinstance(source, TextDrafter):
        return source.kind
    servers, language = source
    if isinstance(language, TextDraft):
        blocks, confidences = language.api.path != CHAT, language.api.ends_blocks
    else:
        blocks, confidences = True, isinstance(servers, ReplicaPool) and language.shares_tokens
    return SourceKind(is_model=True, blocks=blocks, confidences=confidences)


@dataclass
class _Timed:
    """A draft in progress.

    Attributes:
        confidences: the draft model's probability of each token; empty if the server does not list them.
        text: the draft, if it passes as text.
    """

    confidences: list[float] = field(default_factory=list)
    text: TextStream | None = None
    _start: float = field(default_factory=time.perf_counter)
    _first: tuple[float, int] = (0.0, 0)
    _last: tuple[float, int] = (0.0, 0)

    def note(self, n: int) -> None:
        """Record that the draft has n tokens now."""
        if n > self._last[1]:
            self._last = time.perf_counter() - self._start, n
            self._first = self._first if self._first[1] else self._last

    @property
    def seconds(self) -> tuple[float, float]:
        """Time until the first token, and of each decoding step; all time belongs to the steps of a single piece."""
        (first_s, first), (last_s, last) = self._first, self._last
        return (first_s, (last_s - first_s) / (last - first)) if last > first else (0.0, last_s / last)


class ServerModelPair:
    """The `ModelPair` of one request over servers.

    Args:
        source: of the drafts.
        at, draft_at: leases of the replicas for this request.
        length: ends the blocks of `Plan.ends_early`.
    """

    def __init__(
        self,
        target: Target,
        source: Drafts,
        request: Request,
        plan: Plan,
        at: Lease,
        draft_at: Lease | None,
        length: BlockLength,
    ) -> None:
        self.plan, self.segmenter, self.drafted = plan, target.segmenter, 0
        self._target, self._source, self._request = target, source, request
        self._length = length if plan.ends_early else None
        self._draft: _Timed | None = None  # the last draft
        self._choice: int | None = None  # the target's own token after the accepted ones, if a read has shown it
        # The target's stream ends early where drafts go on, and after the thinking.
        self._streamed = plan.streamed or plan.replayed or plan.continues or plan.answer is not None
        self._at, self._draft_at = at, draft_at
        self._prefill: asyncio.Task[None] | None = None

    def max_draft_tokens(self) -> int:
        reads, context = self._target.reads, len(self._request.context)
        left = self._target.language.window - context
        if reads is not None:
            unread = min(context, PREFILL) if self._at.server.reads_cache else context
            left = min(left, reads.max_tokens - unread)
        free = max(0, left - self._target.tokens_after_draft)
        block = free if self.plan.ends_early else self.plan.block or free
        return min(self._request.answer.remaining_tokens, free, block)

    async def propose(self, round: int) -> Sequence[int]:
        request, self.drafted = self._request, 0
        if request.fallback is not None or not self.plan.drafts or not self.max_draft_tokens():
            return []
        if isinstance(self._source, TextDrafter):
            return self._source.propose(request.answer.ids, self.max_draft_tokens()).ids
        writing = self._source[1].begin(request.answer.ids, self.max_draft_tokens())
        if writing is None:
            return []
        reads_prefix = self._target.questions is not None or self._at.server.reads_cache
        if reads_prefix and round == 1 and len(request.context) >= PREFILL:
            self._prefill = asyncio.create_task(self._read_prompt(list(request.context)))
        try:
            await self._read_draft(self._source, writing, round)
        except RequestRejected as error:
            return self._fall_back(error, "draft_refused")
        except Unavailable as error:
            if not writing.n:  # the beginning of a draft is a draft too
                return self._fall_back(error, "no_draft")
        finally:
            request.count_forwards(draft=writing.n)
            self.drafted = writing.n
        return writing.draft().ids

    async def verify(self, draft: Sequence[int]) -> Verdict:
        request, target = self._request, self._target
        cuts = self.segmenter.cuts(draft) if self.plan.judged == "cut" else []
        if not draft or (self.plan.judged == "cut" and not cuts):
            return Verdict(cuts=[], validity=[])
        if self._prefill is not None:
            await self._prefill
        request.count_forwards(target=1)
        begin = time.perf_counter()
        try:
            if target.reads is None:
                return await target.ask(request.context, draft, cuts, self._at)
            carried = request.carried
            written = request.answer.ids[carried.tokens :]
            by_token = self.plan.judged == "token"
            return await target.read(request.context, draft, None if by_token else cuts, carried, written, self._at)
        except (ValueError, Failing) as error:
            self._fall_back(error)
            return Verdict(cuts=[], validity=[])
        finally:
            self._read_s = time.perf_counter() - begin

    def count_greedy_matches(self, draft: Sequence[int], verdict: Verdict, cut: int) -> int:
        if not isinstance(verdict, ServerVerdict) or verdict.by_token:
            return 0  # without a read, the target's choices would cost one response per token
        if not self.plan.keeps_greedy_match:
            return 0
        matches = (own == id for own, id in zip(verdict.choices[cut:], draft[cut:], strict=True))
        return sum(1 for _ in itertools.takewhile(bool, matches))

    def compact(self, verdict: Verdict, kept: Collection[int]) -> Verdict:
        return verdict

    def commit(self, draft: Sequence[int], verdict: Verdict, kept: int) -> None:
        # The next prompt holds all state, and the server has its prefix blocks cached.
        request = self._request
        if self._length is not None and self._draft is not None and draft and request.fallback is None:
            self._note_block(self._length, self._draft, draft, kept)
        known = isinstance(verdict, ServerVerdict) and kept < len(draft)
        if known and request.settings.resume_sampling.greedy and not request.answer.required:
            assert isinstance(verdict, ServerVerdict)
            self._choice = verdict.choices[kept]
        else:
            self._choice = None

    async def resume(self, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        if self._choice is not None:
            yield self._choice
        request, requests = self._request, [(self._streamed, sys.maxsize)]
        strict = (request.settings.strict_tokens or 0) - len(request.answer.ids)
        if strict > 0:  # they have a short request of their own, which no draft cancels
            requests.insert(0, (False, strict))
        for streamed, limit in requests:
            async with aclosing(self._target.written(request, self._at, streamed, limit)) as tokens:
                async for token in tokens:
                    request.count_forwards(target=1)
                    yield token

    def draft_continues(self, draft: Sequence[int], kept: int, written: Sequence[int]) -> bool:
        if not self.plan.continues or not (draft or self.drafted):
            return False
        if kept == len(draft) and draft:
            return True
        if draft and self.plan.after_rejection == "segment":
            return self.segmenter.first_segment_end(written) is not None
        return len(written) >= 1

    async def close(self) -> None:
        """Cancel a pending request."""
        if self._prefill is not None:
            self._prefill.cancel()
            await asyncio.gather(self._prefill, return_exceptions=True)

    def _fall_back(self, error: Exception, reason: Fallback | None = None) -> list[int]:
        """Let the target write the rest. Raises the error if fallback is off or no target server answers.

        Args:
            reason: None: the judge failed.
        """
        gone = reason is None and isinstance(error, Unavailable) and not isinstance(error, Failing)
        if gone or not self.plan.falls_back:
            raise error
        reason = reason or "judge_failed"
        self._request.fall_back(reason)
        # A server may quote the request in its message, which stays out of the log.
        why: object = error
        if isinstance(error, RequestRejected):
            why = f"a request was rejected ({error.status})"
        log.warning("the target answers without a draft (%s): %s", reason, why)
        return []

    async def _read_draft(self, drafts: Any, writing: DraftStream | TextStream, round: int) -> None:
        servers, source = drafts
        sampling, length = self._request.settings.draft_sampling, self._length
        silence_s = DRAFT_SILENCE_S if self.plan.falls_back else _MEASURED_SILENCE_S
        timed = self._draft = _Timed()
        if isinstance(writing, TextStream):
            timed.confidences, timed.text = writing.confidences, writing
            body = writing.body(sampling, round, logprobs=length is not None)
            written = servers.relayed(source.api.path, body, self._draft_at, silence_s, read_chunk)
        else:
            settings = server_settings(sampling, source.end_ids, "draft", round)
            listed: dict[str, Any] = {"silence_s": silence_s}
            listed |= {} if length is None else {"confidences": timed.confidences}
            written = servers.written(writing.context, writing.remaining_tokens, settings, self._draft_at, **listed)
        reads, unknown = self._target.reads, self._request.carried.usual is None
        min_tokens = reads.first_tokens if reads is not None and unknown else 0
        ends, seen = None if length is None else length.ending(), 0
        async with aclosing(written) as pieces:
            async for piece in pieces:
                writing.add(piece)
                timed.note(writing.n)
                if writing.is_finished:
                    return
                if ends is not None and len(timed.confidences) > seen:
                    ended = [ends(confidence) for confidence in timed.confidences[seen:]][-1]
                    seen = len(timed.confidences)
                    if ended and (not min_tokens or len(writing.draft().ids) >= min_tokens):
                        return

    def _note_block(self, length: BlockLength, timed: _Timed, draft: Sequence[int], kept: int) -> None:
        """Record what a block cost, and how many of its tokens survived."""
        if not timed.confidences:
            return
        n, (wait_s, step_s) = len(draft), timed.seconds
        confidences = timed.confidences if timed.text is None else timed.text.confidences_of(draft)
        # A server without cached reads reads the context for each block, so the context is no token of the block.
        length.note(confidences[:n], kept, kept < n, step_s * n, self._read_s + wait_s, n)

    async def _read_prompt(self, context: list[int]) -> None:
        with suppress(ValueError, Unavailable):  # later requests report the error
            await self._target.prefill(context, self._at)
