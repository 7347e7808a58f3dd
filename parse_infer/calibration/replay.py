"""The same prompt answered under many settings, for little more than the price of one.

Greedy answers under different thresholds share most of their parts: the draft and its validities come from the same
context, and what the target writes depends only on the tokens before it. A `Replay` stands between the rounds and the
pair, whatever runs its models, and has each part computed once; from then on it is remembered, with the time it took.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from parse_infer.acceptance import reachable_prefixes
from parse_infer.loop import ModelPair, PairWrapper, V
from parse_infer.models.prompts import Prompt
from parse_infer.output import Generation
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings


class ReplayedEngine(Protocol):
    """What a replay needs: a `ParseEngine`, or a `Coordinator`."""

    pair_wrapper: PairWrapper

    def generate(self, prompts: Prompt, settings: GenerationSettings | None = None) -> Any: ...

    def clear_caches(self) -> None: ...


@dataclass
class _Written:
    """What the target writes after some context, as far as anybody has asked, and the seconds up to each token."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ended: bool = False


class Memory:
    """What is known about one prompt, and how long the parts took that were not computed again (`spared_s`)."""

    def __init__(self) -> None:
        self.spared_s = 0.0
        self.parts: dict[tuple[Any, ...], tuple[Any, float]] = {}
        self.written: dict[tuple[int, ...], _Written] = {}

    def knows(self, key: tuple[Any, ...]) -> bool:
        """Whether this part is known; its time counts as spared then."""
        if key in self.parts:
            self.spared_s += self.parts[key][1]
        return key in self.parts


class Replay:
    """`engine` with a memory: `answer` gives what `engine.generate` gives, for greedy settings that differ in nothing
    but what a promise chooses (`parse_infer.calibration.schema.Setting`).

    with Replay(engine) as replay:      # nobody else uses the engine meanwhile
        generation, seconds = replay.answer(prompt, settings)
    """

    def __init__(self, engine: ReplayedEngine) -> None:
        self.engine = engine
        self.memory = Memory()

    def __enter__(self) -> Replay:
        self._before, self.engine.pair_wrapper = self.engine.pair_wrapper, self._remembering
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.pair_wrapper = self._before

    def clear_caches(self) -> None:
        """Another prompt follows; caches are emptied too, so that no part profits from another prompt's."""
        self.memory = Memory()
        self.engine.clear_caches()

    def answer(self, prompt: Prompt, settings: GenerationSettings) -> tuple[Generation, float]:
        """An answer, and the seconds that it would have taken without memory: those of all its parts.

        Raises ValueError for settings that sample: two runs of the same part would then differ.
        """
        if not (settings.draft_sampling.greedy and settings.resume_sampling.greedy):
            raise ValueError("a calibration replays greedy answers only: set both temperatures to 0")
        self.memory.spared_s = 0.0
        started = time.perf_counter()
        generation = self.engine.generate(prompt, settings)
        assert isinstance(generation, Generation)
        return generation, time.perf_counter() - started + self.memory.spared_s

    def _remembering(self, pair: ModelPair[V], request: Request) -> ModelPair[V]:
        return _RememberingPair(pair, request, self.memory)


class _RememberingPair(Generic[V]):
    """A `ModelPair` that asks another one for what is not known yet."""

    def __init__(self, pair: ModelPair[V], request: Request, memory: Memory) -> None:
        self.segmenter, self.threshold = pair.segmenter, pair.threshold
        self.max_draft_tokens, self.compact = pair.max_draft_tokens, pair.compact
        self._pair, self._request, self._memory = pair, request, memory
        self._settled: tuple[Sequence[int], V, int] | None = None

    async def propose(self, round: int) -> Sequence[int]:
        # Where nothing would be kept a pair may draft nothing.
        key = ("draft", self.threshold > 1, tuple(self._request.context), self.max_draft_tokens())
        if not self._memory.knows(key):
            started = time.perf_counter()
            self._memory.parts[key] = await self._pair.propose(round), time.perf_counter() - started
        return self._memory.parts[key][0]

    async def verify(self, draft: Sequence[int]) -> V:
        # The rule decides at which cuts an answer may go on, and so what is kept of a verdict.
        key = ("verdict", tuple(self._request.context), tuple(draft), self._request.settings.acceptance)
        if not self._memory.knows(key):
            started = time.perf_counter()
            verdict = await self._pair.verify(draft)
            verified = time.perf_counter()
            if draft:
                verdict = self._look_everywhere(draft, verdict)
            self._memory.parts[key] = verdict, verified - started
            self._memory.spared_s -= time.perf_counter() - verified  # no part of this answer
        return self._memory.parts[key][0]

    def _look_everywhere(self, draft: Sequence[int], verdict: V) -> V:
        """Ask for the target's own choice behind each cut that may be the last accepted one. Then a few states of the
        verdict are all that is needed of a model, and the others need not be kept."""
        found: dict[int, tuple[int, float]] = {}
        for accepted in reachable_prefixes(verdict.validity, self._request.settings.acceptance):
            cut, started = verdict.cuts[accepted - 1] if accepted else 0, time.perf_counter()
            found[cut] = self._pair.count_greedy_matches(draft, verdict, cut), time.perf_counter() - started
        compact = self._pair.compact(verdict, {cut + tail for cut, (tail, _) in found.items()})
        for cut, part in found.items():
            self._memory.parts["own choice", id(compact), cut] = part
        return compact

    def count_greedy_matches(self, draft: Sequence[int], verdict: V, cut: int) -> int:
        if not draft:
            return 0
        key = ("own choice", id(verdict), cut)  # the memory keeps every verdict alive
        self._memory.knows(key)
        return self._memory.parts[key][0]

    def commit(self, draft: Sequence[int], verdict: V, kept: int) -> None:
        self._settled = draft, verdict, kept  # in earnest only where the target has to write

    async def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        assert self._settled is not None
        written = self._memory.written.setdefault(tuple(self._request.context), _Written())
        known, before = len(written.tokens), 0.0
        for token, seconds in zip(written.tokens[:known], written.seconds[:known], strict=True):
            self._memory.spared_s += seconds - before
            before = seconds
            yield token
        if written.ended:
            return
        draft, verdict, kept = self._settled
        started = time.perf_counter()
        # Where somebody stopped reading before, the target goes on behind what is in the answer by now.
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
