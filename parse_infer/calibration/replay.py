"""The same prompt answered under many settings, for little more than the price of one.

Greedy answers under different thresholds share most of their parts: the draft and its validities come from the same
context, and what the target writes depends only on the tokens before it. `ReplayEngine` runs the engine's own loop and
computes each part once; from then on it is remembered, with the time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from parse_infer.drafters.drafter import Draft, Drafter
from parse_infer.engine import ParseEngine
from parse_infer.generation import Generation, GenerationSettings, Source
from parse_infer.guesses.token_drafter import TokenDrafter
from parse_infer.models.loading import LanguageModel
from parse_infer.models.prompts import Prompt
from parse_infer.models.sampling import Sampling
from parse_infer.request import Request
from parse_infer.verify.verifier import Verification, Verifier


@dataclass
class _Written:
    """What a model writes after some context, as far as anybody has asked, and the seconds up to each token."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ended: bool = False


class Memory:
    """What is known about one prompt, and how long the parts took that were not computed again."""

    def __init__(self) -> None:
        self.spared_s = 0.0
        self.drafts: dict[tuple[Any, ...], tuple[Draft, float]] = {}
        self.verifications: dict[tuple[Any, ...], tuple[Verification, float]] = {}
        self.matches: dict[tuple[int, int], tuple[int, float]] = {}
        self.written: dict[tuple[int, ...], _Written] = {}


class ReplayEngine(ParseEngine):
    """`engine` with a memory: `answer` gives what `engine.generate` gives, for greedy settings.

    Shares the models of `engine`; use one of the two at a time.
    """

    def __init__(self, engine: ParseEngine) -> None:
        if engine.drafter is None:
            raise ValueError("a calibration needs a draft model: give one with draft=…")
        self.memory = Memory()
        super().__init__(
            engine.target,
            engine.draft,
            engine.judge,
            drafter=_RememberingDrafter(engine.drafter, self),
            target_drafter=engine.target_drafter,
            draft_drafter=engine.draft_drafter,
            threshold=engine.threshold,
            cut_policy=engine.segmenter.policy,
        )
        self.verifier = _RememberingVerifier(engine.verifier, self)

    def forget(self) -> None:
        """Another prompt follows; caches are emptied too, so that no part profits from another prompt's."""
        self.memory = Memory()
        for lm in (self.target, self.draft):
            if lm is not None:
                lm.decoder.seek([])

    def answer(self, prompt: Prompt, settings: GenerationSettings) -> tuple[Generation, float]:
        """An answer, and the seconds that it would have taken without memory: those of all its parts.

        Raises ValueError for settings that sample: two runs of the same part would then differ.
        """
        if not (settings.draft_sampling.greedy and settings.resume_sampling.greedy):
            raise ValueError("a calibration replays greedy answers only: set both temperatures to 0")
        self.memory.spared_s = 0.0
        started = time.perf_counter()
        generation = self.generate(prompt, settings)
        assert isinstance(generation, Generation)
        return generation, time.perf_counter() - started + self.memory.spared_s

    def _decode(
        self, model: LanguageModel, request: Request, drafter: TokenDrafter | None, role: Source, round: int = 1
    ) -> Iterator[int]:
        if model is not self.target:
            yield from super()._decode(model, request, drafter, role, round)
            return
        written = self.memory.written.setdefault(tuple(request.context), _Written())
        known, begun = 0, len(written.tokens)
        while known < begun:
            self.memory.spared_s += written.seconds[known] - (written.seconds[known - 1] if known else 0.0)
            known += 1
            yield written.tokens[known - 1]
        if written.ended:
            return
        if begun:  # somebody stopped here before: the decoder goes on behind what is in the answer by now
            model.decoder.seek(request.context)
        before = written.seconds[-1] if written.seconds else 0.0
        spent = 0.0
        tokens = super()._decode(model, request, drafter, role, round)
        while True:
            started = time.perf_counter()
            token = next(tokens, None)
            spent += time.perf_counter() - started
            if token is None:
                written.ended = True
                return
            written.tokens.append(token)
            written.seconds.append(before + spent)
            yield token


class _RememberingDrafter:
    def __init__(self, drafter: Drafter, engine: ReplayEngine) -> None:
        self._drafter, self._engine = drafter, engine

    @property
    def forwards(self) -> int:
        return self._drafter.forwards

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        self._drafter.reset(prompt, sampling, stop)

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        memory, key = self._engine.memory, (tuple(answer_ids), max_new_tokens)
        if key in memory.drafts:
            draft, seconds = memory.drafts[key]
            memory.spared_s += seconds
            return draft
        started = time.perf_counter()
        draft = self._drafter.propose(answer_ids, max_new_tokens)
        memory.drafts[key] = draft, time.perf_counter() - started
        return draft


class _RememberingVerifier(Verifier):
    def __init__(self, verifier: Verifier, engine: ReplayEngine) -> None:
        super().__init__(verifier.decoder, verifier.judge, verifier.segmenter)
        self._engine = engine

    def verify(self, draft_ids: Sequence[int], cuts: Sequence[int] | None = None) -> Verification:
        memory = self._engine.memory
        key = (tuple(self.decoder.ids), tuple(draft_ids), None if cuts is None else tuple(cuts))
        if key in memory.verifications:
            verification, seconds = memory.verifications[key]
            memory.spared_s += seconds
            return verification
        started = time.perf_counter()
        verification = super().verify(draft_ids, cuts)
        memory.verifications[key] = verification, time.perf_counter() - started
        return verification

    def greedy_match(self, draft_ids: Sequence[int], verification: Verification, start: int = 0) -> int:
        memory, key = self._engine.memory, (id(verification), start)  # the memory keeps every verification alive
        if key in memory.matches:
            match, seconds = memory.matches[key]
            memory.spared_s += seconds
            return match
        started = time.perf_counter()
        match = super().greedy_match(draft_ids, verification, start)
        memory.matches[key] = match, time.perf_counter() - started
        return match
