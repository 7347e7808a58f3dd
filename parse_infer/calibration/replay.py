"""Memoised answers: one prompt under many settings for little more than the cost of one answer.

Answers under different thresholds share most of their parts. Greedy drafts and validities depend only on the context,
and the target's tokens only on the tokens before them and, where it samples, on its seed. A `Replay` wraps each
request's `ModelPair`, on any backend. It computes each part once. Its answers are right, but not timed as a user would
wait for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from parse_infer.decoding.loop import ModelPair, V
from parse_infer.errors import CalibrationError
from parse_infer.request.output import Generation
from parse_infer.request.request import Request
from parse_infer.settings.acceptance import reachable_prefixes
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.prompts import Prompt

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine


@dataclass
class _Written:
    """The target's tokens after a context, as far as computed."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


class Memory:
    """Stored parts of one prompt's answers."""

    def __init__(self) -> None:
        self.parts: dict[tuple[Any, ...], Any] = {}
        self.written: dict[tuple[Any, ...], _Written] = {}


class Replay:
    """Memoises `engine.generate` for settings with greedy drafts that differ only in the target's sampling and in
    fields of `parse_infer.calibration.schema.OperatingPoint`.

    with Replay(engine) as replay:      # exclusive use of the engine
        generation = replay.answer(prompt, settings)
    """

    def __init__(self, engine: ParseEngine) -> None:
        self.engine = engine
        self.memory = Memory()

    def __enter__(self) -> Replay:
        self.engine.pair_wrapper = self._memoise
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.pair_wrapper = None

    def clear_caches(self) -> None:
        """Drop all stored parts and clear the engine's caches, so that the next prompt starts cold."""
        self.memory = Memory()
        self.engine.clear_caches()

    def answer(self, prompt: Prompt, settings: GenerationSettings) -> Generation:
        """Return an answer. Raise ValueError for settings under which two runs of one part would differ."""
        own = settings.resume_sampling
        if not settings.draft_sampling.greedy or (own.seed is None and not own.greedy):
            raise CalibrationError("a calibration replays greedy drafts, and samples of the target with a seed only")
        generation = self.engine.generate(prompt, settings)
        assert isinstance(generation, Generation)
        return generation

    def _memoise(self, pair: ModelPair[V], request: Request) -> ModelPair[V]:
        return _MemoisedPair(pair, request, self.memory)


class _MemoisedPair(Generic[V]):
    """A `ModelPair` that calls another one for parts that are not stored yet."""

    def __init__(self, pair: ModelPair[V], request: Request, memory: Memory) -> None:
        self.segmenter, self.plan = pair.segmenter, pair.plan
        self.max_draft_tokens, self.compact = pair.max_draft_tokens, pair.compact
        self.draft_continues = pair.draft_continues
        self._pair, self._request, self._memory, self.drafted = pair, request, memory, 0
        self._committed: tuple[Sequence[int], V, int] | None = None

    async def propose(self, round: int) -> Sequence[int]:
        key = ("draft", self.plan.drafts, self.plan.block, tuple(self._request.context), self.max_draft_tokens())
        if key not in self._memory.parts:
            self._memory.parts[key] = await self._pair.propose(round), self._pair.drafted
        draft: Sequence[int]
        draft, self._pair.drafted = self._memory.parts[key]
        return draft

    async def verify(self, draft: Sequence[int]) -> V:
        # The acceptance rule decides which cuts are reachable, and so which rows `compact` keeps.
        key = (
            "verdict",
            tuple(self._request.context),
            tuple(draft),
            self._request.settings.acceptance,
            self._request.carried,
            self.plan.judged,
            self.plan.keeps_greedy_match,
        )
        if key not in self._memory.parts:
            verdict = await self._pair.verify(draft)
            self._memory.parts[key] = self._count_all_matches(draft, verdict) if draft else verdict
        found: V = self._memory.parts[key]
        return found

    def _count_all_matches(self, draft: Sequence[int], verdict: V) -> V:
        """Count the greedy matches after each reachable cut, then drop the states that no cut needs."""
        found: dict[int, int] = {}
        for accepted in reachable_prefixes(verdict.validity, self._request.settings.acceptance):
            cut = verdict.cuts[accepted - 1] if accepted else 0
            found[cut] = self._pair.count_greedy_matches(draft, verdict, cut)
        compact = self._pair.compact(verdict, {cut + tail for cut, tail in found.items()})
        for cut, tail in found.items():
            self._memory.parts["greedy matches", id(compact), cut] = tail
        return compact

    def count_greedy_matches(self, draft: Sequence[int], verdict: V, cut: int) -> int:
        if not draft:
            return 0
        # Ids are unique, since the memory keeps every verdict alive.
        tail: int = self._memory.parts["greedy matches", id(verdict), cut]
        return tail

    def commit(self, draft: Sequence[int], verdict: V, kept: int) -> None:
        self._committed = draft, verdict, kept  # `resume` commits if the target must write

    async def resume(self, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        assert self._committed is not None
        context, own = tuple(self._request.context), self._request.settings.resume_sampling
        # Of a sampled run each place has random numbers of its own, so it is not the beginning of a longer one.
        key = (context,) if own.greedy else (context, own, self.plan.after_rejection)
        written = self._memory.written.setdefault(key, _Written())
        known = len(written.tokens)
        for token in written.tokens[:known]:
            yield token
        if written.ended:
            return
        draft, verdict, kept = self._committed
        # If an earlier consumer stopped inside this run, the target continues after the tokens in the answer.
        self._pair.commit(() if known else draft, verdict, 0 if known else kept)
        async with aclosing(self._pair.resume(rejected[known:])) as tokens:
            async for token in tokens:
                written.tokens.append(token)
                yield token
        written.ended = True
