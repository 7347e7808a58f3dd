"""The engine: a draft model proposes, the target verifies in one pass, keeps what holds, and goes on from there.

The heart is `parse_infer.loop.rounds`; here are the models that it runs. Reference: PARSE, arXiv 2605.04263.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from parse_infer.acceptance import check_threshold
from parse_infer.adaptive import Controller
from parse_infer.answer import Answer
from parse_infer.calibration.schema import Calibration, resolve_risk, shipped_calibration
from parse_infer.drafters.draft_model import ModelDrafter
from parse_infer.drafters.source import DraftSource
from parse_infer.drafters.text import TextDrafter
from parse_infer.events import Done, Event, Interrupted, Resumed
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.cuts import CutPolicy, Segmenter
from parse_infer.judge.verifier import Judge, Verification, Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.loop import PairWrapper, identity, run_sync, segments_of, speculate
from parse_infer.models.environment import describe_machine
from parse_infer.models.loading import LanguageModel, find_model, load_language_model
from parse_infer.models.names import resolve
from parse_infer.models.prompts import Prompt, as_batch, left_context, with_drafts
from parse_infer.models.sampling import Sampling
from parse_infer.models.token_map import token_map
from parse_infer.output import Generation, Score, Source
from parse_infer.provenance import describe_drafter, describe_models
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings
from parse_infer.speculation.decode import speculative_decode
from parse_infer.speculation.draft_model import DraftModelProposer
from parse_infer.speculation.proposer import TokenProposer
from parse_infer.speculation.registry import check_token_drafter, load_token_drafter
from parse_infer.speculation.rejected_draft import RejectedDraft

AUTO = "auto"  # token drafter: the draft model, where there is one whose tokens are tokens of the target
DEFAULT_THRESHOLD = 0.5  # for a judge that was never calibrated: more likely right than wrong


class ParseEngine:
    """Generates with a target model whose answers a draft model mostly writes.

    Holds one cache per model, which serves one request at a time (threads wait for each other): prompts that share a
    beginning (a system prompt, the conversation so far) do not prefill it again. `from_pretrained` loads the parts by
    name.

    Args:
        target: the model whose quality is kept.
        draft: the draft model; None if drafts come as text, or from `drafter`.
        judge: a `ValidityAdapter` or `ZeroShotJudge`; None leaves only mode "exact".
        drafter: another source of drafts than `draft`.
        threshold: default threshold; None takes the judge's calibrated one, or 0.5 where it has none.
        cut_policy: where drafts are cut; None takes what the judge was trained with.
        calibration: what `risk` in a request's settings goes by.

    Attributes:
        around: what stands between the rounds and the pair, for every request; nothing by default.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        judge: Judge | None = None,
        *,
        drafter: DraftSource | None = None,
        target_drafter: TokenProposer | None = None,
        draft_drafter: TokenProposer | None = None,
        threshold: float | None = None,
        cut_policy: CutPolicy | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.judge = judge
        self.target_drafter = target_drafter
        self.draft_drafter = draft_drafter
        self.drafter = ModelDrafter(draft, target, draft_drafter) if drafter is None and draft is not None else drafter
        calibrated = judge.config.threshold if judge is not None else None
        self.threshold = next(t for t in (threshold, calibrated, DEFAULT_THRESHOLD) if t is not None)
        check_threshold(self.threshold)
        if cut_policy is None:
            cut_policy = CutPolicy.from_dict(judge.config.cut_policy) if judge is not None else CutPolicy()
        self.segmenter = Segmenter(target.tokenizer, cut_policy, 0 if judge is None else len(judge.probe.ids))
        self.verifier = Verifier(target.decoder, judge, self.segmenter)
        self.calibration = calibration
        self.controller = Controller()
        self.pair_wrapper: PairWrapper = identity
        self._checked: Calibration | None = None
        self._current: Request | None = None
        self._turn = RLock()

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        adapter: str | Path | None = None,
        *,
        gguf_file: str | None = None,
        zero_shot: bool = False,
        target_drafter: str | None = AUTO,
        draft_drafter: str | None = None,
        threshold: float | None = None,
        cut_policy: CutPolicy | None = None,
        calibration: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        template_options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> ParseEngine:
        """Load target, draft model and adapter, each by Hugging Face id, local folder or "zoo:target", "zoo:draft",
        "zoo:adapter". A model may also be a GGUF file, "smollm2" or a LoRA (`parse_infer.models.names`); `gguf_file`,
        as in transformers, names the target's file in its folder or repository, like target="folder/model.gguf".

        Without an adapter, `zero_shot=True` asks the target itself whether a prefix is right; without either, only
        mode "exact" generates. `template_options` are switches of the chat templates (`{"enable_thinking": False}`).
        `target_drafter` and `draft_drafter` speed up what each model writes itself; greedy tokens stay the same (in
        float32), sampled ones keep their distribution: "lookup", the folder or name of a head, or for the target
        "draft" (see `parse_infer.speculation.registry`). By default the draft model guesses for the target where its
        tokens are tokens of the target (the same tokenizer, or a reduced vocabulary); None: nobody does.
        `dtype` "auto" is the one a model was saved in, and float32 on CPUs that are slow in 16 bits.
        `calibration` is a file made by `parse-infer calibrate`; by default that in the adapter's folder, if any.

        Raises ValueError or OSError with one sentence for whatever is missing, damaged or does not fit.
        """
        if zero_shot and adapter is not None:
            raise ValueError(f"Both an adapter ({str(adapter)!r}) and zero_shot=True were given: choose one judge.")
        if threshold is not None:
            check_threshold(threshold)
        if calibration is not None:
            Calibration.load(calibration)
        if gguf_file is not None:
            target = target / gguf_file if isinstance(target, Path) else f"{target.rstrip('/')}/{gguf_file}"
        find_model(target)  # a wrong name is found before the first model is loaded
        if draft is not None:
            find_model(draft)
        if adapter is not None:
            adapter = resolve(adapter)
        if draft_drafter is not None and draft is None:
            raise ValueError(f"draft_drafter is {draft_drafter!r}, but there is no draft model that it could speed up")
        if target_drafter not in (None, AUTO):
            check_token_drafter("target_drafter", target_drafter, str(target), has_draft=draft is not None)
        if draft_drafter is not None:
            check_token_drafter("draft_drafter", draft_drafter, str(draft), has_draft=False)
        load = partial(
            load_language_model,
            device=device,
            dtype=dtype,
            template_options=template_options,
            trust_remote_code=trust_remote_code,
        )
        loaded = load(target, role="target")
        judge: Any = None
        if adapter is not None:
            judge = ValidityAdapter.from_pretrained(adapter, loaded.model)
        elif zero_shot:
            judge = ZeroShotJudge(loaded.model, loaded.tokenizer)
        draft_model = load(draft, role="draft") if draft is not None else None
        if target_drafter == AUTO:
            known = draft_model is not None and token_map(draft_model.tokenizer, loaded.tokenizer) is not None
            target_drafter = "draft" if known else None
        engine = cls(
            loaded,
            draft_model,
            judge,
            target_drafter=load_token_drafter(target_drafter, loaded, draft_model) if target_drafter else None,
            draft_drafter=load_token_drafter(draft_drafter, draft_model) if draft_drafter and draft_model else None,
            threshold=threshold,
            cut_policy=cut_policy,
            calibration=Calibration.load(calibration) if calibration is not None else shipped_calibration(adapter),
        )
        if calibration is not None:
            engine.check_calibration()
        return engine

    def close(self) -> None:
        """Nothing to be done here; other backends have servers to stop."""

    def describe(self) -> dict[str, Any]:
        """Which models answer; see `describe_models`."""
        return describe_models(self.target, self.draft, self.judge, self.segmenter.policy)

    def describe_drafters(self) -> dict[str, Any]:
        """Who guesses tokens for either model; see `describe_drafter`."""
        return {
            "target_drafter": describe_drafter(self.target_drafter),
            "draft_drafter": describe_drafter(self.draft_drafter),
        }

    def describe_machine(self) -> dict[str, Any]:
        return describe_machine(self.target.model.device)

    @property
    def train_problems(self) -> frozenset[str]:
        """Hashes of the prompts that the judge was trained on, where they are known."""
        known: frozenset[str] = getattr(self.judge, "train_problems", frozenset())
        return known

    @property
    def deterministic(self) -> bool:
        """Whether a greedy text is the same however it comes about; rounded numbers differ from pass to pass."""
        return self.target.model.dtype == torch.float32

    def clear_caches(self) -> None:
        """Nothing in the caches makes the next answer faster."""
        with self._turn:
            self._current = None  # a stream that is still open cannot go on
            for lm in (self.target, self.draft):
                if lm is not None:
                    lm.decoder.seek([])

    def check_calibration(self) -> None:
        """ValueError unless the calibration was made with these models."""
        if self.calibration is not None and self.calibration is not self._checked:
            self.calibration.check(self.describe())
            self._checked = self.calibration

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        draft_text: str | Sequence[str] | None = None,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """Answer one prompt (text or chat messages), or a list of them in order.

        Args:
            prompts: a text becomes one user message where the target has a chat template.
            settings: see `GenerationSettings`; `overrides` are fields of it.
            draft_text: a draft to use instead of the draft model's, one per prompt.

        Raises ValueError for bad settings, an empty prompt or one beyond the target's window, before any work on any
        of the prompts.
        """
        settings = self._settings(settings, overrides)
        batch, is_list = as_batch(prompts)
        drafts = with_drafts(batch, is_list, draft_text)
        with self._turn:
            prepared = [self._prepare(p, settings, d) for p, d in zip(batch, drafts, strict=True)]
            results = [_last(self._serve(*each)) for each in prepared]
        return results if is_list else results[0]

    def stream(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        draft_text: str | None = None,
        **overrides: Any,
    ) -> Iterator[Event]:
        """Answer one prompt and yield what happens: Drafted, Verified, Accepted, Resumed (for each token), Done.

        The errors of `generate` are raised here, not at the first event. Another request to the engine ends this one.
        """
        with self._turn:
            return self._in_turn(self._serve(*self._prepare(prompt, self._settings(settings, overrides), draft_text)))

    def stream_target(
        self, prompt: Prompt, settings: GenerationSettings | None = None, guided: bool = False, **overrides: Any
    ) -> Iterator[Event]:
        """`generate_target` for one prompt, as it happens: Resumed for each token, Done."""
        settings = self._settings(settings, overrides)
        request = Request(prompt, self.target, settings, settings.resume_sampling)
        return self._in_turn(
            self._write_alone(self.target, "target", request, self.target_drafter if guided else None)
        )

    @contextmanager
    def cancellable(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """Within the `with`, whatever runs raises `Interrupted` before the next forward of a model once `unwanted`
        says so (it may be asked for something that another thread sets). The engine stays usable."""

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

    def score(
        self, prompt: Prompt, response: str, cut_policy: CutPolicy | None = None, finished: bool = True
    ) -> Score:
        """Validity of any response to the prompt, segment by segment, in one forward of the target.

        Args:
            cut_policy: where to cut the response; None cuts as drafts are cut.
            finished: the response is a whole answer, so the last segment is judged with the end token behind it.

        Raises ValueError for an empty prompt or response, and for more tokens than the context window holds.
        """
        judge = self._require_judge()
        if not isinstance(response, str) or not response.strip():
            raise ValueError(f"The response is {response!r}; give the text to score.")
        prompt_ids = self.target.render(prompt)
        drafter = TextDrafter(response, self.target, prompt, finished)
        draft = drafter.propose([], sys.maxsize).ids
        needed = len(prompt_ids) + len(draft) + len(judge.probe.ids)
        if needed > self.target.window:
            raise ValueError(
                f"Prompt, response and probe have {needed} tokens, beyond the context window of {self.target.name!r} "
                f"({self.target.window}): shorten the response."
            )
        segmenter = self.segmenter
        if cut_policy is not None:
            segmenter = Segmenter(self.target.tokenizer, cut_policy, segmenter.probe_tokens)
        with self._turn:
            self._current = None  # a stream that is still open must not go on in this context
            self.target.decoder.seek(prompt_ids)
            verification = self.verifier.verify(draft, cuts=segmenter.cuts(draft))
        answer = Answer(self.target.tokenizer, self.target.eos_ids, (), sys.maxsize, left_context(prompt, prompt_ids))
        return Score(segments_of(answer, draft, verification), self.threshold)

    def generate_target(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        guided: bool = False,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """The target alone, in the same decode loop, with `resume_sampling`: what PARSE is compared with.

        `guided` lets the `target_drafter` guess its tokens: lossless speculation without verification of meaning.
        """
        settings = self._settings(settings, overrides)
        drafter = self.target_drafter if guided else None
        return self._alone(self.target, "target", prompts, settings, settings.resume_sampling, drafter)

    def generate_draft(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        guided: bool = False,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """The draft model alone, with `draft_sampling`; `token_ids` are its own tokens.

        `guided` lets the `draft_drafter` guess them.
        """
        if self.draft is None:
            raise ValueError("This engine has no draft model: pass draft=… to from_pretrained.")
        settings = self._settings(settings, overrides)
        drafter = self.draft_drafter if guided else None
        return self._alone(self.draft, "draft", prompts, settings, settings.draft_sampling, drafter)

    def _serve(self, request: Request, drafter: DraftSource) -> Generator[Event]:
        """All events of a request: with a draft, or by the target alone where that has been faster."""
        adaptive = request.settings.adaptive and drafter is self.drafter
        if not adaptive or not self._writes_draft(request.settings, drafter):
            yield from self._with_draft(request, drafter)
            return
        answer = self.controller.begin()
        if answer.drafted:
            events = self._with_draft(request, drafter)
        else:
            events = self._write_alone(self.target, "target", request, self.target_drafter)
        for event in events:
            # An empty draft says nothing about drafts: the prompt is beyond the draft model's window.
            if isinstance(event, Done) and (event.generation.stats.draft_tokens or not answer.drafted):
                done = event.generation
                self.controller.note(answer, done.timings.work_s, len(done.token_ids), kept=request.kept)
            yield event

    def _writes_draft(self, settings: GenerationSettings, drafter: DraftSource) -> bool:
        """Whether the drafter is asked. Above a threshold of 1 a draft model that guesses tokens for the target writes
        no draft as well: the answer is lossless speculation, `adaptive` or not."""
        guesses_too = drafter is self.drafter and isinstance(self.target_drafter, DraftModelProposer)
        assert settings.threshold is not None  # `_prepare` has put in the engine's own
        return settings.mode == "exact" or settings.threshold <= 1 or not guesses_too

    def _with_draft(self, request: Request, drafter: DraftSource) -> Generator[Event]:
        """All events of a request, with its costs counted."""
        settings, stats, target = request.settings, request.stats, self.target.decoder
        target_before, drafter_before = target.forwards, self._drafter_forwards()
        draft_before = self._draft_forwards(drafter)
        self._current = request
        request.start()
        drafter.reset(request.prompt, settings.draft_sampling, settings.stop)
        for event in run_sync(speculate(self.pair_wrapper(LocalModelPair(self, request, drafter), request), request)):
            yield event
            if self._current is not request:
                raise RuntimeError("This stream has ended, because the engine has been given another request since.")
        stats.target_forwards = target.forwards - target_before
        stats.draft_forwards = self._draft_forwards(drafter) - draft_before
        stats.drafter_forwards = self._drafter_forwards() - drafter_before
        yield Done(request.result())

    def _in_turn(self, events: Generator[Event]) -> Iterator[Event]:
        """The same events, each step while no other thread uses the models.

        A stream may be dropped anywhere, in an event loop or by the garbage collector, so closing it takes no lock.
        That is safe: between two steps it holds nothing but objects of its own.
        """
        try:
            while True:
                with self._turn:
                    event = next(events, None)
                if event is None:
                    return
                yield event
        finally:
            events.close()

    def _prepare(
        self, prompt: Prompt, settings: GenerationSettings, draft_text: str | None
    ) -> tuple[Request, DraftSource]:
        """Everything that can be wrong with a request is found here, before any model runs."""
        if settings.mode == "validity":
            self._require_judge()
        if settings.risk is not None and draft_text is not None:
            raise ValueError("risk and draft_text were both given: a promise covers only what the draft model writes")
        if draft_text is None and self.drafter is None:
            raise ValueError("This engine has no draft model: pass draft=… to from_pretrained, or give a draft_text.")
        if settings.threshold is None:
            settings = settings.override(threshold=self.threshold)
        request = Request(prompt, self.target, settings, settings.resume_sampling)
        drafter = self.drafter if draft_text is None else TextDrafter(draft_text, self.target, request.prompt)
        assert drafter is not None
        self._current = None  # a stream that is still open must not go on with a drafter that writes something else
        drafter.reset(request.prompt, settings.draft_sampling, settings.stop)
        return request, drafter

    def _alone(
        self,
        model: LanguageModel,
        source: Source,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings,
        sampling: Sampling,
        drafter: TokenProposer | None,
    ) -> Generation | list[Generation]:
        batch, is_list = as_batch(prompts)
        requests = [Request(prompt, model, settings, sampling) for prompt in batch]
        with self._turn:
            results = [_last(self._write_alone(model, source, request, drafter)) for request in requests]
        return results if is_list else results[0]

    def _write_alone(
        self, model: LanguageModel, source: Source, request: Request, drafter: TokenProposer | None
    ) -> Generator[Event]:
        """Events of an answer that one model writes: Resumed for each token, Done."""
        self._current = request
        request.start()
        target_before, drafter_before = self.target.decoder.forwards, self._drafter_forwards()
        draft_before = self._draft_forwards()
        model.decoder.seek(request.prompt_ids)
        for token in self._decode(model, request, drafter, source):
            yield Resumed(1, request.answer.add([token], source), token)
            if self._current is not request:
                raise RuntimeError("This stream has ended, because the engine has been given another request since.")
            if request.answer.is_finished:
                break
        request.stats.target_forwards = self.target.decoder.forwards - target_before
        request.stats.draft_forwards = self._draft_forwards() - draft_before
        request.stats.drafter_forwards = self._drafter_forwards() - drafter_before
        yield Done(request.result())

    def _decode(
        self, model: LanguageModel, request: Request, drafter: TokenProposer | None, role: Source, round: int = 1
    ) -> Iterator[int]:
        """Tokens of `model` for the rest of the answer, to which the consumer adds each; what it does besides is not
        timed."""
        sampling, decoder = request.sampling, model.decoder
        # Random numbers of its own for each role and round: a rejected token must not be drawn again by the noise
        # that wrote it.
        generator = sampling.generator(decoder.device, role, round)
        field = "resume_s" if model is self.target else "draft_s"
        while (
            request.answer.remaining_tokens > 0
        ):  # a decode ends with the stretch without end tokens, and at any end token
            stretch, banned = request.answer.required or request.answer.remaining_tokens, request.answer.banned_ids
            tokens = speculative_decode(decoder, drafter, stretch, sampling, generator, banned)
            while True:
                with request.timed(field):
                    token = next(tokens, None)
                if token is None:
                    break
                yield token
            decoder.seek(request.context)  # without what was read behind an end token that ends nothing

    def _draft_forwards(self, drafter: DraftSource | None = None) -> int:
        """Of the draft model, whatever it does; else of another drafter."""
        if self.draft is not None:
            return self.draft.decoder.forwards
        return 0 if drafter is None else drafter.forwards

    def _drafter_forwards(self) -> int:
        return sum(drafter.forwards for drafter in (self.target_drafter, self.draft_drafter) if drafter is not None)

    def _require_judge(self) -> Judge:
        if self.judge is None:
            raise ValueError(
                "This engine has nothing to judge drafts with: pass adapter=… or zero_shot=True to from_pretrained, "
                "or generate with mode='exact'."
            )
        return self.judge

    def _settings(self, settings: GenerationSettings | None, overrides: Mapping[str, Any]) -> GenerationSettings:
        settings = (settings or GenerationSettings()).override(**overrides)
        if settings.risk is not None:
            self.check_calibration()
        return resolve_risk(settings, self.calibration)


def _last(events: Iterator[Event]) -> Generation:
    """What a stream ends with."""
    *_, done = events
    assert isinstance(done, Done)
    return done.generation


class LocalModelPair:
    """A `ModelPair` of the engine's models. All of its methods run at once; none of them waits."""

    def __init__(self, engine: ParseEngine, request: Request, drafter: DraftSource) -> None:
        settings = request.settings
        self.segmenter = engine.segmenter
        assert settings.threshold is not None
        self.threshold = settings.threshold
        self._engine, self._request, self._drafter = engine, request, drafter
        # Whether draft tokens that equal the target's greedy choice are used behind the accepted cut.
        self._exact = settings.mode == "exact"
        self._probe_len = 0 if self._exact else len(engine._require_judge().probe.ids)
        self._wants_tail = self._exact or (settings.exact_tail and settings.resume_sampling.greedy)
        self._drafts = engine._writes_draft(settings, drafter)

    def max_draft_tokens(self) -> int:
        """The budget, and what the window holds besides context and one probe."""
        behind = self._engine.target.window - self._probe_len - len(self._request.context)
        return min(self._request.answer.remaining_tokens, behind)

    async def propose(self, round: int) -> Sequence[int]:
        return self._drafter.propose(self._request.answer.ids, self.max_draft_tokens()).ids if self._drafts else ()

    async def verify(self, draft: Sequence[int]) -> Verification:
        """One target forward over [uncached context, draft, probes]; context and draft stay in the cache."""
        decoder, context = self._engine.target.decoder, self._request.context
        decoder.reserve(
            len(context), self._request.answer.remaining_tokens + self._probe_len * self.segmenter.policy.max_cuts
        )
        decoder.seek(context)
        return self._engine.verifier.verify(draft, cuts=[] if self._exact else None)

    def count_greedy_matches(self, draft: Sequence[int], verdict: Verification, cut: int) -> int:
        return self._engine.verifier.greedy_match(draft, verdict, cut) if self._wants_tail else 0

    def compact(self, verdict: Verification, kept: Collection[int]) -> Verification:
        return verdict.compact(kept)

    def commit(self, draft: Sequence[int], verdict: Verification, kept: int) -> None:
        """The cache is cut back; the first token of a resume comes out of the verification pass."""
        decoder = self._engine.target.decoder
        decoder.seek(self._request.context)
        if draft:
            decoder.set_next_logits(decoder.logits(verdict.state(kept)))

    async def resume(self, round: int, rejected: Sequence[int]) -> AsyncGenerator[int, None]:
        guesses = self._engine.target_drafter
        if self._wants_tail:  # what was rejected still says how the answer may be worded, and costs nothing
            guesses = RejectedDraft(self._request.context, rejected, otherwise=guesses)
        for token in self._engine._decode(self._engine.target, self._request, guesses, "target", round):
            yield token
