"""The decoding loop: propose → verify → select → resume, until the answer ends. Reference: PARSE, arXiv 2605.04263.

One function serves every backend. A `ModelPair` runs the models: in this process, where no method ever waits (so
`run_sync` needs no event loop), or on servers.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from parse_infer.acceptance import maximal_valid_prefix
from parse_infer.answer import Answer
from parse_infer.events import Drafted, Event, Resumed, Verified
from parse_infer.judge.cuts import Segmenter
from parse_infer.output import Segment
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings

T = TypeVar("T")


class Verdict(Protocol):
    """About a draft: K cuts, and the validity of the prefix up to each."""

    @property
    def cuts(self) -> list[int]: ...

    @property
    def validity(self) -> list[float]: ...


V = TypeVar("V", bound=Verdict)


class ModelPair(Protocol, Generic[V]):
    """A target, and whoever drafts for it, at work on one answer (`request.answer`, which `rounds` alone extends)."""

    segmenter: Segmenter
    threshold: float
    """For this request."""

    async def propose(self, round: int) -> Sequence[int]:
        """A draft of the rest of the answer, in target tokens; too long a one is cut off."""
        ...

    def max_draft_tokens(self) -> int:
        """Tokens that a draft may have now."""
        ...

    async def verify(self, draft: Sequence[int]) -> V: ...

    def count_greedy_matches(self, draft: Sequence[int], verdict: V, cut: int) -> int:
        """How many tokens behind the cut equal the target's own (greedy) choice and are to be kept for that; 0 where
        nobody knows."""
        ...

    def compact(self, verdict: V, kept: Collection[int]) -> V:
        """The verdict for a caller that keeps many: `settle` takes it for these numbers of kept tokens only, and
        `own_choice` not at all."""
        ...

    def commit(self, draft: Sequence[int], verdict: V, kept: int) -> None:
        """The answer has `kept` tokens of the draft now, the others are dropped."""
        ...

    def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        """What the target writes next, token by token, as far as there is room. May be closed at any time."""
        ...


PairWrapper = Callable[[ModelPair[Any], Request], ModelPair[Any]]
"""Puts something between the rounds and the pair of a request."""


def identity(pair: ModelPair[Any], request: Request) -> ModelPair[Any]:
    return pair


async def speculate(pair: ModelPair[V], request: Request) -> AsyncGenerator[Event, None]:
    """All events of an answer but the last (`Done`)."""
    settings, answer = request.settings, request.answer
    for round in itertools.count(1):
        # propose: a draft of the whole rest of the answer
        with request.timed("draft_s"):
            draft = answer.truncate(await pair.propose(round), pair.max_draft_tokens())
        yield Drafted(round, "".join(answer.preview(draft, [len(draft)])), len(draft))

        # verify: the target reads the draft once, and says of each prefix whether it holds
        with request.timed("verify_s"):
            verdict = await pair.verify(draft)
        segments = segments_of(answer, draft, verdict)
        yield Verified(round, segments)

        # select: the maximal valid prefix, and behind it what equals the target's own choice
        with request.timed("verify_s"):
            kept = maximal_valid_prefix(verdict.validity, pair.threshold, settings.acceptance)
            cut = verdict.cuts[kept - 1] if kept else 0
            tail = pair.count_greedy_matches(draft, verdict, cut)
        yield request.accept(round, draft, segments[:kept], tail)
        if answer.is_finished:
            return

        # resume: the target goes on from there
        pair.commit(draft, verdict, cut + tail)
        hands_back = bool(draft) and may_hand_back(settings, pair.threshold, round)
        if hands_back and cut + tail == len(draft):
            continue  # all of it holds, and the draft model may have more to say
        resumed: list[int] = []
        async with aclosing(pair.resume(round, draft[cut + tail :])) as tokens:
            async for token in tokens:
                resumed.append(token)
                yield Resumed(round, answer.add([token], "target"), token)
                if answer.is_finished:
                    return
                # Inside a character another tokenizer has nothing to go on from.
                if hands_back and answer.complete and pair.segmenter.first_segment_end(resumed):
                    break


def may_hand_back(settings: GenerationSettings, threshold: float, round: int) -> bool:
    """Whether the draft model takes over again after this round. Above a threshold of 1 it does not: nothing of a
    second draft would be kept either."""
    keeps = threshold <= 1 or settings.mode == "exact"
    return settings.resume == "hand_back" and keeps and round < settings.max_rounds


def segments_of(answer: Answer, draft: Sequence[int], verdict: Verdict) -> list[Segment]:
    """The segments of a draft that continues `answer`, with their validities."""
    cuts = verdict.cuts
    texts = answer.preview(draft, cuts)
    sizes = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    return [Segment(t, n, v) for t, n, v in zip(texts, sizes, verdict.validity, strict=True)]


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without an event loop. RuntimeError for one that waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("this coroutine waits, and there is no event loop here")
