"""Backend that runs both models in this process: one KV cache per model, one answer at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch

from parse_infer.backends.local.describe import describe_drafter, describe_models
from parse_infer.backends.local.pair import LocalModelPair
from parse_infer.backends.local.written import written
from parse_infer.calibration.schema import Calibration
from parse_infer.decoding.block_length import REPLAYED, BlockLength
from parse_infer.decoding.loop import ModelPair, PairWrapper, run_sync, speculate_in_phases
from parse_infer.decoding.plan import Judging, Plan
from parse_infer.drafters.model_drafter import ModelDrafter, with_template
from parse_infer.drafters.source import DraftSource
from parse_infer.drafters.text import TextDrafter
from parse_infer.errors import ChatTemplateError, PromptError, SettingsError
from parse_infer.judge.judge import Judge, looks_ahead
from parse_infer.judge.verifier import Verification, Verifier
from parse_infer.models.environment import describe_machine
from parse_infer.models.loading import LanguageModel
from parse_infer.request.events import Event, Interrupted, Resumed
from parse_infer.request.output import Source
from parse_infer.request.request import Request
from parse_infer.settings.acceptance import ACCEPT_NOTHING
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_infer.token_drafters.proposer import TokenProposer

log = logging.getLogger("parse_infer.backends")

T = TypeVar("T")


class LocalBackend:
    """A `Backend` for models in this process.

    Args:
        target: the model whose quality PARSE preserves.
        draft: the draft model; None if drafts are texts or come from `drafter`.
        judge: a `ValidityAdapter`, `RuleJudge` or `ZeroShotJudge`; None: lossless speculation.
        drafter: a source of drafts that replaces `draft`.
        target_drafter: token drafter of the target.
        cut_policy: where to cut drafts; None takes the judge's training policy.
        train_problems: hashes of the models' training prompts; the judge knows its own.
    """

    parallel = 1
    adaptive = False
    strict_tokens = 0
    falls_back = True

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        judge: Judge | None = None,
        *,
        drafter: DraftSource | None = None,
        target_drafter: TokenProposer | None = None,
        cut_policy: CutPolicy | None = None,
        calibrations: tuple[Calibration, ...] = (),
        train_problems: frozenset[str] = frozenset(),
    ) -> None:
        self.target = target
        self.draft = draft = None if draft is None else with_template(draft, target)
        self.judge = judge
        self.target_drafter = target_drafter
        self.drafter = ModelDrafter(draft, target) if drafter is None and draft is not None else drafter
        self.calibrations = calibrations
        self._train_problems = train_problems
        self.threshold: float | None = judge.config.threshold if judge is not None else None
        if cut_policy is None:
            cut_policy = CutPolicy.from_dict(judge.config.cut_policy) if judge is not None else CutPolicy()
        self.segmenter = Segmenter(target.tokenizer, cut_policy, 0 if judge is None else judge.tokens_per_cut)
        self.verifier = Verifier(target.decoder, judge, self.segmenter)
        self.block_lengths: defaultdict[int, BlockLength] = defaultdict(BlockLength)  # by `Plan.measured_as`
        self._current: Request | None = None
        self._turn = RLock()

    @property
    def train_problems(self) -> frozenset[str]:
        return self._train_problems | getattr(self.judge, "train_problems", frozenset[str]())

    @property
    def deterministic(self) -> bool:
        return self.target.model.dtype == torch.float32

    @property
    def tokens_after_draft(self) -> int:
        return self.segmenter.tokens_per_cut

    def describe(self) -> dict[str, Any]:
        return describe_models(self.target, self.draft, self.judge, self.segmenter.policy)

    def describe_drafters(self) -> dict[str, Any]:
        return {"target_drafter": describe_drafter(self.target_drafter)}

    def describe_machine(self) -> dict[str, Any]:
        compiled = {"torch_compile": True} if self.target.torch_compile else {}
        return describe_machine(self.target.model.device) | compiled

    def load(self, running: int) -> int:
        return running

    def check(self, settings: GenerationSettings, calibrations: Sequence[Calibration]) -> None:
        """Do nothing: this backend serves all settings."""

    def replayable(self, length: BlockTokens) -> BlockTokens:
        as_text = isinstance(self.drafter, ModelDrafter) and not self.drafter.passes_tokens
        varies = (as_text and self._judging == "token") or looks_ahead(self.verifier.scorer)
        return REPLAYED if length == "auto" and varies else length

    @property
    def _judging(self) -> Judging | None:
        scorer = self.verifier.scorer
        return None if scorer is None else "token" if scorer.by_token else "cut"

    def lossless(self, settings: GenerationSettings) -> GenerationSettings:
        return settings.override(threshold=ACCEPT_NOTHING)

    def draft_source(self, request: Request, draft_text: str | TextDrafter | None) -> DraftSource | PromptError:
        if draft_text is None and self.drafter is None:
            raise SettingsError(
                "This engine has no draft model: pass draft=… to from_pretrained, or give a draft_text."
            )
        if isinstance(draft_text, str):
            draft_text = TextDrafter(draft_text, self.target, request.prompt)
        drafter = self.drafter if draft_text is None else draft_text
        assert drafter is not None
        try:
            drafter.check(request.prompt)
        except ChatTemplateError as error:  # the target has rendered the prompt
            return error
        return drafter

    def plan(self, request: Request, source: DraftSource, *, streamed: bool, replayed: bool) -> Plan:
        # If the draft model proposes the target's tokens, a draft above a threshold of 1 brings nothing more.
        proposes = source is self.drafter and isinstance(self.target_drafter, DraftModelProposer)
        planned = partial(
            Plan.of,
            source=replace(source.kind, lossless=not proposes),
            judging=self._judging,
            pauses=True,
            streamed=streamed,
            replayed=replayed,
        )
        plan, settings = planned(request.settings), request.settings
        return replace(plan, answer=planned(self.lossless(settings))) if settings.strict_answer else plan

    async def with_draft(
        self, request: Request, plan: Plan, source: DraftSource, wrap: PairWrapper | None
    ) -> AsyncGenerator[Event, None]:
        source.reset(request.prompt, request.settings.draft_sampling, request.settings.stop)
        pairs = [self._pair(request, phase, source, wrap) for phase in plan.phases]
        async with aclosing(self._accounted(request, speculate_in_phases(pairs, request), source)) as accounted:
            async for event in accounted:
                yield event

    def _pair(self, request: Request, plan: Plan, source: DraftSource, wrap: PairWrapper | None) -> ModelPair[Any]:
        length, proposer = self.block_lengths[plan.measured_as], self.target_drafter
        pair = LocalModelPair(request, plan, source, self.target, self.verifier, proposer, length)
        return pair if wrap is None else wrap(pair, request)

    def alone(self, request: Request, speculate: bool, streamed: bool) -> AsyncGenerator[Event, None]:
        drafter = self.target_drafter if speculate else None
        return self._accounted(request, self._written(self.target, "target", request, drafter))

    def draft_alone(self, request: Request) -> AsyncGenerator[Event, None]:
        assert self.draft is not None
        return self._accounted(request, self._written(self.draft, "draft", request, None))

    async def judge_text(
        self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int] | None
    ) -> Verification:
        self._current = None  # the context changes, so an open stream must end
        self.target.decoder.seek(context)
        cuts = self.segmenter.cuts(draft) if cuts is None else cuts
        return self.verifier.verify(draft, cuts)

    def clear_caches(self) -> None:
        with self._turn:
            self._current = None  # end an open stream
            for lm in (self.target, self.draft):
                if lm is not None:
                    lm.decoder.seek([])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_sync(work)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        run_sync(work)

    def turn(self) -> RLock:
        return self._turn

    @contextmanager
    def cancellable(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """Raise `Interrupted` before a model's next forward once `unwanted` returns True, within the `with` block.
        Another thread may make `unwanted` True. The engine stays usable."""

        def check() -> None:
            if unwanted():
                raise Interrupted

        decoders = [model.decoder for model in (self.target, self.draft) if model is not None]
        before = [decoder.before_forward for decoder in decoders]
        try:
            for decoder in decoders:
                decoder.before_forward = check
            yield
        finally:
            for decoder, earlier in zip(decoders, before, strict=True):
                decoder.before_forward = earlier

    def close(self) -> None:
        """Do nothing: this backend starts no processes."""

    async def _accounted(
        self, request: Request, events: AsyncGenerator[Event, None], source: DraftSource | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events and count all forwards. Raise RuntimeError once the engine starts another request."""
        self._current = request
        before = self._forwards(source)
        async with aclosing(events):
            async for event in events:
                yield event
                if self._current is not request:
                    raise RuntimeError(
                        "This stream has ended, because the engine has been given another request since."
                    )
        request.count_forwards(*(now - then for now, then in zip(self._forwards(source), before, strict=True)))

    def _forwards(self, source: DraftSource | None) -> tuple[int, int, int]:
        """Forwards so far of the target, of the draft model (or other draft source), and of the token drafter."""
        drafting = self.draft.decoder.forwards if self.draft is not None else source.forwards if source else 0
        proposing = 0 if self.target_drafter is None else self.target_drafter.forwards
        return self.target.decoder.forwards, drafting, proposing

    async def _written(
        self, model: LanguageModel, role: Source, request: Request, drafter: TokenProposer | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer that one model writes: Resumed for each token."""
        model.decoder.seek(request.prompt_ids)
        for token in written(model, request, drafter, role):
            yield Resumed(1, request.answer.add([token], role), token)
            if request.answer.is_finished:
                return
