"""`ParseEngine`: a draft model proposes, the target verifies in one pass, keeps the valid prefix and continues.

The engine resolves settings and risk levels, chooses between PARSE and the target alone, and records the cost. A
backend runs the models, in this process (`parse_infer.backends.local`) or on servers (`parse_infer.backends.servers`).
The decoding loop is `parse_infer.decoding.loop.speculate`. Reference: PARSE, arXiv 2605.04263.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from parse_infer.backends.base import Backend
from parse_infer.backends.build_options import builder, check_arguments, check_backend_options
from parse_infer.calibration.promises import resolve_risk
from parse_infer.calibration.schema import Calibration
from parse_infer.decoding.adaptive import Controller, InFlight
from parse_infer.decoding.loop import PairWrapper, segments_of
from parse_infer.drafters.text import TextDrafter
from parse_infer.errors import CalibrationError, PromptError, SettingsError
from parse_infer.request.answer import Answer
from parse_infer.request.events import Accepted, Done, Event, Resumed
from parse_infer.request.output import Generation, Score
from parse_infer.request.request import Request
from parse_infer.settings.acceptance import check_threshold
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_infer.text.prompts import Prompt, as_batch, changed_option, left_context, with_drafts

log = logging.getLogger("parse_infer.backends")
DEFAULT_THRESHOLD = 0.5  # for a judge without a calibrated threshold
AHEAD = 4
_ACCEPTS_NOTHING = (
    "the adapter's own threshold accepts no draft: run `parse-infer calibrate` and give a risk, or give a threshold"
)


class ParseEngine:
    """Generates answers that a draft model writes and a target model verifies. Build one with `from_pretrained`.

    with ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter") as engine:
        print(engine.generate("A boy has 6 stickers. His brother has 3 fewer. How many do they have together?").text)

    Backend "local" answers one request at a time; other threads wait. Consecutive prompts with a common prefix prefill
    it once. With backend "vllm" the prompts of one call share the servers, as do the `events` of one event loop.

    Args:
        backend: runs the models.
        threshold: default threshold; None takes the judge's calibrated threshold, or 0.5 for a judge without one.
        calibrations: operating points for each `risk`, one calibration for each sampling; None takes the backend's.

    Attributes:
        adaptive, strict_tokens: defaults for requests that leave these `GenerationSettings` at None. Only a request's
            own `adaptive=False` also leaves out pauses between blocks.
        pair_wrapper: wraps the `ModelPair` of every request, to memoise it for a replay.
        running: number of requests in flight.
    """

    def __init__(
        self, backend: Backend, *, threshold: float | None = None, calibrations: Sequence[Calibration] | None = None
    ) -> None:
        self.backend = backend
        check_judged(threshold, backend.judge is not None)
        chosen = next(t for t in (threshold, backend.threshold, DEFAULT_THRESHOLD) if t is not None)
        self.threshold = check_threshold(chosen)
        self._accepts_nothing = threshold is None and self.threshold > 1
        self.calibrations = backend.calibrations if calibrations is None else tuple(calibrations)
        self.adaptive, self.strict_tokens = backend.adaptive, backend.strict_tokens
        self.controller = Controller()
        self.pair_wrapper: PairWrapper | None = None
        self.running = 0
        self._checked: tuple[Calibration, ...] = ()

    @classmethod
    def from_models(
        cls,
        target: Any,
        draft: Any = None,
        judge: Any = None,
        *,
        threshold: float | None = None,
        calibrations: Sequence[Calibration] | None = None,
        **options: Any,
    ) -> ParseEngine:
        """Build an engine from loaded models; arguments as in `parse_infer.backends.local.backend.LocalBackend`.

            model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
            engine = ParseEngine.from_models(LanguageModel(name, model, tokenizer), draft=LanguageModel(…))

        Args:
            target, draft: `LanguageModel`s.
            judge: a `ValidityAdapter`, `RuleJudge` or `ZeroShotJudge`; None: lossless speculation.
        """
        from parse_infer.backends.local.backend import LocalBackend
        from parse_infer.models.loading import LanguageModel

        check_arguments(options, LocalBackend, ("threshold",))
        for role, model in (("target", target), ("draft", draft)):
            if not isinstance(model, LanguageModel) and (model is not None or role == "target"):
                raise SettingsError(f"{role} is a {type(model).__name__}; give LanguageModel(name, model, tokenizer).")
        if judge is not None and not hasattr(judge, "scorer"):
            raise SettingsError(f"judge is {judge!r}; give a ValidityAdapter, RuleJudge or ZeroShotJudge.")
        return cls(LocalBackend(target, draft, judge, **options), threshold=threshold, calibrations=calibrations)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        adapter: str | Path | None = None,
        *,
        backend: str = "local",
        threshold: float | None = None,
        calibration: str | Path | None = None,
        cut_policy: CutPolicy | str | None = None,
        **options: Any,
    ) -> ParseEngine:
        """Load target, draft model and adapter, each by Hugging Face id, local folder or a name such as "zoo:target".

        Args:
            backend: "local" runs the models in this process, "vllm" on servers.
            threshold: default threshold; None takes the judge's threshold.
            calibration: file written by `parse-infer calibrate`; None reads the file in the adapter's folder, if any.
            cut_policy: where to cut drafts, such as "sentence" or "tokens:4"; None takes the adapter's policy. A
                calibration holds for one policy only.
            options: fields of `parse_infer.backends.local.options.LocalOptions` (device, dtype, judge, …) or
                `parse_infer.backends.servers.options.ServerOptions` (target_url, draft_url, judge, …).

        Raises:
            ValueError: models and adapter do not match, or an argument is invalid.
            OSError: a model file is missing or damaged, or no server of a model responds.
        """
        build, _ = builder(backend)
        check_backend_options(options, backend)
        check_judged(threshold, adapter is not None or options.get("judge") is not None)
        options |= {
            "calibration": calibration,
            "cut_policy": None if cut_policy is None else CutPolicy.parse(cut_policy),
        }
        engine = cls(build(target, draft, adapter, **options), threshold=threshold)
        if calibration is not None and backend == "local":
            engine.check_calibrations()
        return engine

    @property
    def target(self) -> Any:
        """The target: a `LanguageModel` in this process, or the `TokenizerSpec` of a served model."""
        return self.backend.target

    @property
    def draft(self) -> Any:
        """The draft model, of the same types as `target`; None without a draft model, or if its server gets text."""
        return self.backend.draft

    @property
    def train_problems(self) -> frozenset[str]:
        """Hashes of the training prompts of judge and models, as far as their folders list them."""
        known: frozenset[str] = self.backend.train_problems
        return known

    @property
    def deterministic(self) -> bool:
        """Whether greedy output is the same for every way to compute it, such as speculation or batching."""
        return bool(self.backend.deterministic)

    def describe(self) -> dict[str, Any]:
        """The engine's models, as a calibration file records them."""
        return dict(self.backend.describe())

    def describe_drafters(self) -> dict[str, Any]:
        """The token drafter of the target."""
        return dict(self.backend.describe_drafters())

    def describe_machine(self) -> dict[str, Any]:
        """Hardware and library versions of this process."""
        return dict(self.backend.describe_machine())

    def clear_caches(self) -> None:
        """Clear both KV caches. On servers: make new requests miss the prefix caches."""
        self.backend.clear_caches()

    def check_calibrations(self) -> None:
        """Raise ValueError unless all calibrations were measured with the engine's models, and as they are served."""
        if self.calibrations is self._checked:
            return
        for calibration in self.calibrations:
            calibration.check(self.describe())
            for risk, place in calibration.promises.items():
                length = None if place is None else calibration.tried[place].setting.block_tokens
                if length is not None and self.backend.replayable(length) != length:
                    raise CalibrationError(
                        f"the calibration promises a risk of {risk:g} with block_tokens {length}, whose answers "
                        "depend on measured times if draft model and target have different tokens or the judge looks "
                        "ahead: run `parse-infer calibrate` again"
                    )
        self._checked = self.calibrations

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        draft_text: str | Sequence[str] | None = None,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """Answer one prompt (text or chat messages), or a list of prompts in order.

        Args:
            prompts: a text becomes one user message if the target has a chat template.
            settings: `GenerationSettings`, or a mapping of them; `overrides` replace its fields.
            draft_text: a draft to use instead of the draft model's, one per prompt.

        Raises ValueError for invalid settings, an empty prompt or a prompt longer than the target's context window.
        The engine checks all prompts before it runs a model.
        """
        batch, is_list = as_batch(prompts)
        drafts = with_drafts(batch, is_list, draft_text)
        settings = GenerationSettings.of(settings, **overrides)
        with self.backend.turn():
            prepared = [self.events(p, settings, d, streamed=False) for p, d in zip(batch, drafts, strict=True)]
            found = list(self.collect(prepared))
        return found if is_list else found[0]

    def generate_target(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        speculate: bool = False,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """Answer with the target alone, in the same decode loop: the baseline of PARSE.

        With `speculate` the target's token drafter proposes tokens: lossless speculation without a judge.
        """
        batch, is_list = as_batch(prompts)
        settings = GenerationSettings.of(settings, **overrides)
        with self.backend.turn():
            prepared = [self.events(p, settings, alone=True, speculate=speculate, streamed=False) for p in batch]
            found = list(self.collect(prepared))
        return found if is_list else found[0]

    def generate_draft(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """Answer with the draft model alone, in its own tokens; local backend only."""
        if self.draft is None:
            raise SettingsError("This engine has no draft model: pass draft=… to from_pretrained.")
        batch, is_list = as_batch(prompts)
        settings = GenerationSettings.of(settings, **overrides)
        requests = [Request(prompt, self.draft, settings, settings.draft_sampling) for prompt in batch]
        with self.backend.turn():
            found = list(self.collect([self._answer(r, self.backend.draft_alone(r), None) for r in requests]))
        return found if is_list else found[0]

    def stream(
        self,
        prompt: Prompt,
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        draft_text: str | None = None,
        *,
        streamed: bool = True,
        **overrides: Any,
    ) -> Iterator[Event]:
        """Answer one prompt and yield its events: Drafted, Verified, Accepted, Resumed (for each token), Done.

        This call raises the errors of `generate`; the iterator does not. With the local backend another request to
        the engine ends this stream. `streamed` is as in `events`.
        """
        settings = GenerationSettings.of(settings, **overrides)
        with self.backend.turn():
            return self._steps(self.events(prompt, settings, draft_text, streamed=streamed))

    def stream_target(
        self,
        prompt: Prompt,
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        speculate: bool = False,
        **overrides: Any,
    ) -> Iterator[Event]:
        """Answer one prompt with the target alone and yield its events: Resumed for each token, Done."""
        settings = GenerationSettings.of(settings, **overrides)
        return self._steps(self.events(prompt, settings, alone=True, speculate=speculate))

    def events(
        self,
        prompt: Prompt,
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        draft_text: str | TextDrafter | None = None,
        *,
        alone: bool = False,
        speculate: bool = False,
        streamed: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer, `Done` last. All methods that generate use this generator.

        Args:
            draft_text: a draft to use, or an already tokenized `TextDrafter`.
            alone: the target writes the answer, without a draft.
            speculate: with `alone`, see `generate_target`.
            streamed: False lets servers send all tokens at once and the first block be long, which costs less.

        This call raises the ValueErrors of `generate`. On servers the iterator raises OSError if no server responds.
        """
        settings = GenerationSettings.of(settings)
        request = self._request(prompt, settings, draft_text is not None)
        backend, replayed = self.backend, self.pair_wrapper is not None
        if alone:
            request.plan_as(lossless=True)
            return self._answer(request, backend.alone(request, speculate, streamed), None)
        if self._accepts_nothing and settings.threshold is None and settings.risk is None and settings.mode != "exact":
            warnings.warn(_ACCEPTS_NOTHING, stacklevel=2)
        source = self._source(request, draft_text)
        if isinstance(source, PromptError):
            return self._answer(request, self._refused(request, source, streamed), None)
        plan = backend.plan(request, source, streamed=streamed, replayed=replayed)
        request.plan_as(plan.lossless, plan.block_tokens)
        events = backend.with_draft(request, plan, source, self.pair_wrapper)
        adaptive = self.adaptive if request.settings.adaptive is None else request.settings.adaptive
        chooses = adaptive and draft_text is None and plan.drafts
        return self._answer(request, events, backend.alone(request, True, streamed) if chooses else None)

    async def _refused(self, request: Request, error: PromptError, streamed: bool) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer whose prompt the draft model refuses: the target writes it."""
        if self.pair_wrapper is not None or not self.backend.falls_back:  # a measurement
            raise error
        request.fall_back("draft_refused")
        request.plan_as(lossless=True)
        # A chat template may quote the prompt in its message, which stays out of the log.
        log.warning("the target answers without a draft (draft_refused): the draft model refuses the prompt")
        async with aclosing(self.backend.alone(request, True, streamed)) as events:
            async for event in events:
                yield event

    def check(
        self,
        prompt: Prompt,
        settings: GenerationSettings | Mapping[str, Any] | None = None,
        draft_text: str | None = None,
    ) -> None:
        """Raise the ValueError that `events` would raise. No answer in progress notices."""
        request = self._request(prompt, GenerationSettings.of(settings), draft_text is not None)
        self._source(request, draft_text)

    def collect(self, prepared: Iterable[AsyncGenerator[Event, None]]) -> Iterator[Generation]:
        """Yield the generations of several `events` in order, each once it and all earlier generations are complete.

        The backend writes up to `parallel` answers at the same time. `collect` reads at most `AHEAD` times as many
        items ahead, so `prepared` may be a long generator.
        """
        if self.backend.parallel == 1:
            for events in prepared:
                with self.backend.turn():
                    generation = self.backend.run(_last(events))
                yield generation
            return

        slots = asyncio.Semaphore(self.backend.parallel)

        async def answer(events: AsyncGenerator[Event, None]) -> Generation:
            async with slots:
                return await _last(events)

        async def start(events: Iterable[AsyncGenerator[Event, None]]) -> None:
            tasks.extend(asyncio.create_task(answer(each)) for each in events)

        tasks: deque[asyncio.Task[Generation]] = deque()
        source = iter(prepared)
        try:
            while True:
                if arrived := list(islice(source, AHEAD * self.backend.parallel - len(tasks))):
                    self.backend.run(start(arrived))
                if not tasks:
                    return
                yield tasks[0].result() if tasks[0].done() else self.backend.run(_result(tasks[0]))
                tasks.popleft()
        finally:
            self.backend.run(_cancelled(tasks))

    def score(
        self, prompt: Prompt, response: str, cut_policy: CutPolicy | str | None = None, finished: bool = True
    ) -> Score:
        """Score any response to the prompt, segment by segment, in one forward of the target.

        Args:
            cut_policy: where to cut the response, also by name, such as "sentence"; None takes the policy for drafts.
            finished: the response is a whole answer, so the judge reads its last segment with an end token.

        A response unlike the drafts that the judge was trained on gets no validity (`Score.unusual`).

        Raises ValueError for an empty prompt or response, and for more tokens than the context window holds.
        """
        self._require_judge()
        if not isinstance(response, str) or not response.strip():
            raise PromptError(f"The response is {response!r}; give the text to score.")
        target = self.target
        prompt_ids = target.render(prompt)
        draft = TextDrafter(response, target, prompt, finished).propose([], sys.maxsize).ids
        needed = len(prompt_ids) + len(draft) + self.backend.tokens_after_draft
        if needed > target.window:
            raise PromptError(
                f"Prompt, response and judge have {needed} tokens, beyond the context window of {target.name!r} "
                f"({target.window}): shorten the response."
            )
        cuts = None
        if cut_policy is not None:
            policy = CutPolicy.parse(cut_policy)
            cuts = Segmenter(target.tokenizer, policy, self.backend.segmenter.tokens_per_cut).cuts(draft)
        with self.backend.turn():
            verdict = self.backend.run(self.backend.judge_text(prompt_ids, draft, cuts))
        before = left_context(prompt, prompt_ids, target.tokenizer)
        answer = Answer(target.tokenizer, target.eos_ids, (), sys.maxsize, before)
        segments = segments_of(answer, draft, verdict, range(len(verdict.cuts)))
        return Score(segments, self.threshold, verdict.unusual)

    def close(self) -> None:
        """Stop everything that the backend has started, such as servers."""
        self.backend.close()

    def __enter__(self) -> ParseEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _source(self, request: Request, draft_text: str | TextDrafter | None) -> Any:
        """The source of the request's drafts, or the `PromptError` of a draft model that refuses the prompt."""
        settings = request.settings
        if settings.mode == "validity" and settings.threshold is not None and settings.threshold <= 1:
            self._require_judge()
        if not (draft_text is None or isinstance(draft_text, str | TextDrafter)):
            raise PromptError(f"A draft text is a text, not {str(draft_text)[:80]!r}.")
        return self.backend.draft_source(request, draft_text)

    def _require_judge(self) -> None:
        if self.backend.judge is None:
            raise SettingsError("This engine has no judge: pass adapter=… or judge=… to from_pretrained.")

    def _request(self, prompt: Prompt, settings: GenerationSettings, has_draft_text: bool) -> Request:
        """Resolve the settings and check the prompt; raise ValueError for an invalid request."""
        if settings.strict_tokens and has_draft_text:
            raise SettingsError("strict_tokens and draft_text were both given: a given draft begins the answer")
        if settings.risk is not None and has_draft_text:
            raise SettingsError(
                "risk and draft_text were both given: a calibration covers only the draft model's drafts"
            )
        if settings.strict_answer and self.target.thinking_marks is None:
            raise SettingsError(
                f"strict_answer is for models that think, but {self.target.name!r} has no marks around its thinking: "
                "omit strict_answer, or name them with thinking_marks"
            )
        self.backend.check(settings, self.calibrations)
        if settings.risk is not None:
            self.check_calibrations()
        settings = resolve_risk(settings, self.calibrations, changed_option(prompt, self.target.template_options))
        if settings.threshold is None:
            if self.backend.judge is None and settings.mode == "validity":
                settings = self.backend.lossless(settings)
            if settings.threshold is None:
                settings = settings.override(threshold=self.threshold)
        if settings.strict_tokens is None:
            judged = settings.mode == "validity" and settings.threshold is not None and settings.threshold <= 1
            fixed = has_draft_text or settings.risk is not None or self.pair_wrapper is not None
            settings = settings.override(strict_tokens=self.strict_tokens if judged and not fixed else 0)
        return Request(prompt, self.target, settings, settings.resume_sampling)

    async def _answer(
        self,
        request: Request,
        events: AsyncGenerator[Event, None],
        alone: AsyncGenerator[Event, None] | None,
    ) -> AsyncGenerator[Event, None]:
        """Yield `events`, or `alone` while the target has been faster without a draft, and record their cost."""
        request.start()
        with self.in_flight(), self._choice() if alone is not None else nullcontext() as answer:
            chosen = events
            if answer is not None and not answer.drafted and alone is not None:
                chosen = alone
                request.plan_as(lossless=True)
            async with aclosing(chosen):
                async for event in chosen:
                    if isinstance(event, (Accepted, Resumed)) and event.text:
                        request.note_text()
                    yield event
            generation = request.result()
            # The controller ignores empty drafts (prompt beyond the draft model's window) and failures.
            drafted = generation.stats.draft_tokens and request.fallback in (None, "unusual_draft")
            if answer is not None and (drafted or not answer.drafted):
                seconds, tokens = generation.timings.work_s, len(generation.token_ids)
                self.controller.note(answer, seconds, tokens, self._load, kept=request.kept)
        yield Done(generation)

    @contextmanager
    def in_flight(self, answers: int = 1) -> Iterator[None]:
        """Count answers in `running` within the block: also those that the servers give without the engine."""
        self.running += answers
        try:
            yield
        finally:
            self.running -= answers

    @property
    def _load(self) -> int:
        """Requests that share the target now. Without concurrency a dropped stream does not count."""
        return self.backend.load(1 if self.backend.parallel == 1 else self.running)

    def _choice(self) -> AbstractContextManager[InFlight]:
        """Decide whether the next answer gets a draft."""
        if self.backend.parallel == 1:
            return nullcontext(self.controller.begin(self._load))
        return self.controller.answering(self.running, self._load)

    def _steps(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        """Yield the events; hold the models during each step.

        Closing takes no lock, because an event loop or the garbage collector may close a stream at any point.
        """
        try:
            while True:
                with self.backend.turn():
                    event = self.backend.run(_next(events))
                if event is None:
                    return
                yield event
        finally:
            self.backend.finish(_closed(events))


def check_judged(threshold: float | None, has_judge: bool) -> None:
    """Raise ValueError for a default threshold out of range, or one that needs a judge where there is none."""
    if threshold is not None and check_threshold(threshold) <= 1 and not has_judge:
        raise SettingsError(
            f"threshold is {threshold}, but no judge was given: give adapter=… or judge=…, or omit the threshold for "
            "lossless speculation."
        )


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _last(events: AsyncGenerator[Event, None]) -> Generation:
    async with aclosing(events):
        *_, done = [event async for event in events]
    assert isinstance(done, Done)
    return done.generation


async def _closed(events: AsyncGenerator[Event, None]) -> None:
    await events.aclose()


async def _result(task: asyncio.Task[Generation]) -> Generation:
    return await task


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
