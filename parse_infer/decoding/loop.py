"""The decoding loop: propose → verify → select → resume, until the answer ends. Reference: PARSE, arXiv 2605.04263.

One function serves every backend. A `ModelPair` runs the models, in this process or on servers. In this process its
methods never suspend, so `run_sync` needs no event loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from parse_infer.decoding.plan import Plan
from parse_infer.judge.judge import Verdict
from parse_infer.request.answer import Answer
from parse_infer.request.events import Drafted, Event, Resumed, Verified
from parse_infer.request.output import Segment
from parse_infer.request.request import Request
from parse_infer.settings.acceptance import maximal_valid_prefix
from parse_infer.text.cuts import Segmenter

log = logging.getLogger(__name__)
T = TypeVar("T")


V = TypeVar("V", bound=Verdict)


class ModelPair(Protocol, Generic[V]):
    """Target and draft source of one request. Only `speculate` extends the request's answer."""

    plan: Plan
    segmenter: Segmenter
    drafted: int
    """Tokens that the draft model wrote for the last draft, in its own tokens; 0: it cannot continue."""

    async def propose(self, round: int) -> Sequence[int]:
        """Draft the next block, or the rest of the answer, in target tokens; the loop truncates what is too long."""
        ...

    def max_draft_tokens(self) -> int:
        """Maximum length of the next draft."""
        ...

    async def verify(self, draft: Sequence[int]) -> V: ...

    def count_greedy_matches(self, draft: Sequence[int], verdict: V, cut: int) -> int:
        """Count the tokens after the cut to accept as the target's greedy choice; 0 if the choice is unknown."""
        ...

    def compact(self, verdict: V, kept: Collection[int]) -> V:
        """Shrink a verdict for storage. Afterwards `commit` accepts only these values of `kept`, and
        `count_greedy_matches` does not accept the verdict."""
        ...

    def commit(self, draft: Sequence[int], verdict: V, kept: int) -> None:
        """Adopt the first `kept` draft tokens, which the answer already holds, and drop the others."""
        ...

    def draft_continues(self, draft: Sequence[int], kept: int, written: Sequence[int]) -> bool:
        """Whether the draft model continues after the first `kept` tokens of its draft and the tokens that the target
        has `written` since. Never for a draft that is a whole answer."""
        ...

    def resume(self, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        """Yield the target's next tokens, up to the budget. The caller may close the generator at any time."""
        ...


PairWrapper = Callable[[ModelPair[Any], Request], ModelPair[Any]]
"""Wraps a request's `ModelPair`, to memoise it."""


async def speculate_in_phases(pairs: Sequence[ModelPair[V]], request: Request) -> AsyncGenerator[Event, None]:
    """Yield all events of an answer except `Done`, by the pair of each phase (`Plan.phases`)."""
    for pair in pairs:
        async with aclosing(speculate(pair, request)) as events:
            async for event in events:
                yield event
        if request.answer.is_finished:
            return


async def speculate(pair: ModelPair[V], request: Request) -> AsyncGenerator[Event, None]:
    """Yield the events of an answer, or of its thinking if another plan follows."""
    settings, answer, plan = request.settings, request.answer, pair.plan
    thinking = None if plan.answer is None else request.thinking
    if thinking is not None and thinking.ended(answer.ids):
        return
    for round in itertools.count(request.stats.rounds + 1):
        strict = len(answer.ids) < (settings.strict_tokens or 0)  # nothing is drafted yet

        # propose: the draft model drafts a block, or the rest of the answer
        with request.timed("draft_s"):
            proposed = () if strict else await pair.propose(round)
            draft = answer.truncate(proposed, pair.max_draft_tokens())
            if thinking is not None:
                draft = draft[: thinking.tokens_of(draft, answer.ids)]
        yield Drafted(round, "".join(answer.preview(draft, [len(draft)])), len(draft))

        # verify: the target reads the draft once; the judge scores each prefix
        with request.timed("verify_s"):
            verdict = await pair.verify(draft)
        if verdict.unusual and request.fallback is None:
            request.fall_back("unusual_draft")
            answer.forget_validity()  # of a first block that was too short to tell
            log.info("out of the judge's training distribution: from here on only the target's first choices are kept")

        # select: the maximal valid prefix, then the tokens that equal the target's greedy choice
        with request.timed("verify_s"):
            # The validity of an unusual draft is 0, which a threshold of 0 would accept.
            threshold = max(plan.threshold, 1e-6) if verdict.unusual else plan.threshold
            kept = maximal_valid_prefix(verdict.validity, threshold, settings.acceptance)
            cut = verdict.cuts[kept - 1] if kept else 0
            tail = pair.count_greedy_matches(draft, verdict, cut)
        shown = _shown(draft, verdict, kept)
        segments = segments_of(answer, draft, verdict, shown)
        yield Verified(round, segments)
        accepted = segments[: sum(i < kept for i in shown)]
        n = len(answer.ids) + cut
        yield request.accept(round, draft, accepted, tail, joins=verdict.by_token or not verdict.cuts)
        if answer.is_finished:
            return

        if (scores := verdict.scores) is not None:
            before = request.carried
            request.carried = scores.carried(n, cut) if cut else replace(before, usual=scores.usual, seen=scores.seen)

        # resume: the target continues after the accepted tokens
        pair.commit(draft, verdict, cut + tail)
        if thinking is not None and thinking.ended(answer.ids):
            return
        written: list[int] = []
        if not strict and pair.draft_continues(draft, cut + tail, written):
            continue
        async with aclosing(pair.resume(draft[cut + tail :])) as tokens:
            async for token in tokens:
                written.append(token)
                yield Resumed(round, answer.add([token], "target"), token)
                if answer.is_finished or (thinking is not None and thinking.ended(answer.ids)):
                    return
                # Another tokenizer cannot continue inside a character.
                if not answer.complete or len(answer.ids) < (settings.strict_tokens or 0):
                    continue
                if strict or pair.draft_continues(draft, cut + tail, written):
                    break


def segments_of(answer: Answer, draft: Sequence[int], verdict: Verdict, shown: Sequence[int]) -> list[Segment]:
    """The segments of a draft that continues `answer`, up to the verdict's cuts of the indices `shown`.

    Those of an unusual draft have no validity.
    """
    validity = [None if verdict.unusual else verdict.validity[i] for i in shown]
    cuts = [verdict.cuts[i] for i in shown]
    texts = answer.preview(draft, cuts)
    sizes = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    return [Segment(*parts) for parts in zip(texts, sizes, validity, strict=True)]


def _shown(draft: Sequence[int], verdict: Verdict, kept: int) -> list[int]:
    """Indices of the cuts to report. With a cut after every token: the accepted tokens, the rejected one, the rest."""
    n = len(verdict.cuts)
    if n < len(draft):
        return list(range(n))
    return sorted({i for i in (kept - 1, kept, n - 1) if 0 <= i < n})


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop. Raise RuntimeError if it suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("the coroutine suspended, but run_sync has no event loop")
