"""Memoised answers: one prompt under many settings for little more than the cost of one answer.

Greedy answers under different thresholds share most of their parts. Drafts and validities depend only on the context,
and the target's tokens only on the tokens before them. A `Replay` wraps each request's `ModelPair`, on any backend. It
computes each part once and stores the result with its time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from parse_infer.acceptance import reachable_prefixes
from parse_infer.errors import CalibrationError
from parse_infer.loop import ModelPair, V
from parse_infer.models.prompts import Prompt
from parse_infer.output import Generation
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine


@dataclass
class _Written:
    """The target's tokens after a context, as far as computed, and the seconds up to each token."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ended: bool = False


class Memory:
    """Stored parts of one prompt's answers, and the total time of the parts that were reused (`spared_s`)."""

    def __init__(self) -> None:
        self.spared_s = 0.0
        self.parts: dict[tuple[Any, ...], tuple[Any, float]] = {}
        self.written: dict[tuple[int, ...], _Written] = {}

    def knows(self, key: tuple[Any, ...]) -> bool:
        """Whether this part is stored. If so, add its time to `spared_s`."""
        if key in self.parts:
            self.spared_s += self.parts[key][1]
        return key in self.parts


class Replay:
    """Memoises `engine.generate` for greedy settings that differ only in fields of
    `parse_infer.calibration.schema.OperatingPoint`.

    with Replay(engine) as replay:      # exclusive use of the engine
        generation, seconds = replay.answer(prompt, settings)
    """

    def __init__(self, engine: ParseEngine) -> None:
        self.engine = engine
        self.memory = Memory()

    def __enter__(self) -> Replay:
        self._before, self.engine.pair_wrapper = self.engine.pair_wrapper, self._memoise
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.pair_wrapper = self._before

    def clear_caches(self) -> None:
        """Drop all stored parts and clear the engine's caches, so that the next prompt starts cold."""
        self.memory = Memory()
        self.engine.clear_caches()

    def answer(self, prompt: Prompt, settings: GenerationSettings) -> tuple[Generation, float]:
        """Return an answer and the seconds of all its parts, including reused parts.

        Raises ValueError for settings that sample, because two runs of one part would differ.
        """
        if not (settings.draft_sampling.greedy and settings.resume_sampling.greedy):
            raise CalibrationError("a calibration replays greedy answers only: set both temperatures to 0")
        self.memory.spared_s = 0.0
        started = time.perf_counter()
        generation = self.engine.generate(prompt, settings)
        assert isinstance(generation, Generation)
        return generation, time.perf_counter() - started + self.memory.spared_s

    def _memoise(self, pair: ModelPair[V], request: Request) -> ModelPair[V]:
        return _MemoisedPair(pair, request, self.memory)


class _MemoisedPair(Generic[V]):
    """A `ModelPair` that calls another one for parts that are not stored yet."""

    def __init__(self, pair: ModelPair[V], request: Request, memory: Memory) -> None:
        self.segmenter, self.threshold = pair.segmenter, pair.threshold
        self.max_draft_tokens, self.compact = pair.max_draft_tokens, pair.compact
        self.draft_continues = pair.draft_continues
        self._pair, self._request, self._memory = pair, request, memory
        self._committed: tuple[Sequence[int], V, int] | None = None

    async def propose(self, round: int) -> Sequence[int]:
        # A pair may draft nothing at a threshold above 1, which accepts nothing.
        key = (
            "draft",
            self.threshold > 1,
            self._request.settings.block_tokens,
            tuple(self._request.context),
            self.max_draft_tokens(),
        )
        if not self._memory.knows(key):
            started = time.perf_counter()
            self._memory.parts[key] = await self._pair.propose(round), time.perf_counter() - started
        return self._memory.parts[key][0]

    async def verify(self, draft: Sequence[int]) -> V:
        # The acceptance rule decides which cuts are reachable, and so which rows `compact` keeps. Blocks may be judged
        # token by token, and above 1 not at all.
        whole = self._request.settings.block_tokens == "whole"
        key = (
            "verdict",
            tuple(self._request.context),
            tuple(draft),
            self._request.settings.acceptance,
            self._request.carried,
            whole,
            not whole and self.threshold > 1,
        )
        if not self._memory.knows(key):
            started = time.perf_counter()
            verdict = await self._pair.verify(draft)
            verified = time.perf_counter()
            if draft:
                verdict = self._count_all_matches(draft, verdict)
            self._memory.parts[key] = verdict, verified - started
            self._memory.spared_s -= time.perf_counter() - verified  # not part of this answer
        return self._memory.parts[key][0]

    def _count_all_matches(self, draft: Sequence[int], verdict: V) -> V:
        """Count the greedy matches after each reachable cut, then drop the states that no cut needs."""
        found: dict[int, tuple[int, float]] = {}
        for accepted in reachable_prefixes(verdict.validity, self._request.settings.acceptance):
            cut, started = verdict.cuts[accepted - 1] if accepted else 0, time.perf_counter()
            found[cut] = self._pair.count_greedy_matches(draft, verdict, cut), time.perf_counter() - started
        compact = self._pair.compact(verdict, {cut + tail for cut, (tail, _) in found.items()})
        for cut, part in found.items():
            self._memory.parts["greedy matches", id(compact), cut] = part
        return compact

    def count_greedy_matches(self, draft: Sequence[int], verdict: V, cut: int) -> int:
        if not draft:
            return 0
        key = ("greedy matches", id(verdict), cut)  # ids are unique, since the memory keeps every verdict alive
        self._memory.knows(key)
        return self._memory.parts[key][0]

    def commit(self, draft: Sequence[int], verdict: V, kept: int) -> None:
        self._committed = draft, verdict, kept  # `resume` commits if the target must write

    async def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        assert self._committed is not None
        written = self._memory.written.setdefault(tuple(self._request.context), _Written())
        known, before = len(written.tokens), 0.0
        for token, seconds in zip(written.tokens[:known], written.seconds[:known], strict=True):
            self._memory.spared_s += seconds - before
            before = seconds
            yield token
        if written.ended:
            return
        draft, verdict, kept = self._committed
        started = time.perf_counter()
        # If an earlier consumer stopped inside this run, the target continues after the tokens in the answer.
        self._pair.commit(() if known else draft, verdict, 0 if known else kept)
        spent = time.perf_counter() - started
        async with aclosing(self._pair.resume(round, rejected[known:])) as tokens:
            while True:
                started = time.perf_counter()
                next_token = await anext(tokens, None)
                spent += time.perf_counter() - started
                if next_token is None:
                    written.ended = True
                    return
                written.tokens.append(next_token)
                written.seconds.append(before + spent)
                yield next_token
