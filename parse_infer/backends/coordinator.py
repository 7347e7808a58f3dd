"""`Coordinator`: what `ParseEngine` is for two models in this process, for any number of requests to servers.

with Coordinator.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", target_url=…, draft_url=…) as engine:
    print(engine.generate("…").text)
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from parse_infer.acceptance import check_threshold
from parse_infer.adaptive import Controller
from parse_infer.backends.client import Client
from parse_infer.backends.factory import Urls, find_parts, servable
from parse_infer.backends.health import Server
from parse_infer.backends.local_draft import LocalDraft
from parse_infer.backends.replicas import ReplicaPool
from parse_infer.backends.retries import Lease
from parse_infer.backends.supervisor import Processes
from parse_infer.backends.vllm import Drafts, ServerModelPair, Target
from parse_infer.calibration.schema import Calibration
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft
from parse_infer.drafters.draft_model import share_tokens
from parse_infer.drafters.text import TextDrafter
from parse_infer.engine import DEFAULT_THRESHOLD
from parse_infer.events import Done, Event, Resumed
from parse_infer.judge.cuts import CutPolicy
from parse_infer.loop import PairWrapper, identity, speculate
from parse_infer.models.environment import describe_machine
from parse_infer.models.prompts import Prompt, as_batch, with_drafts
from parse_infer.models.tokenizer_spec import TokenizerSpec
from parse_infer.output import Generation
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings
from parse_infer.vllm_plugin.validity_requests import TrainedQuestions

PARALLEL = 64  # answers under way at the same time
Result = TypeVar("Result")


class Coordinator:
    """Generates with a target that vLLM serves, and a draft model that it serves too or that runs here.

    Keeps nothing of a request: any number of coordinators may share the servers. Answers are those of a `ParseEngine`
    with `exact_tail=False`, as far as the servers compute what it computes; sampled ones have other random numbers.

    Args:
        target: the servers whose quality is kept.
        draft: the draft model's servers, or itself, and its language; None if drafts come as text.
        threshold: default threshold.
        overlap: verify segments while the draft is written; changes no answer.
        parallel: how many answers `generate` and `each` keep under way.
        models: which they are; see `describe`.
        train_problems: hashes of the prompts that the judge was trained on, see `leave_out_learnt`.
        calibration: what `risk` in a request's settings goes by; made over servers too.
        processes: servers that were started for this, and end with `close`.

    Attributes:
        adaptive: of requests whose settings do not say.
        around: as in `ParseEngine`.
        falls_back: without a draft server, or where a draft cannot be judged, the target answers alone, at once
            (`Generation.fallback`). False, for measurements: that is an error, after `patience_s`.
    """

    deterministic = False
    """What a server computes with others at the same time may be rounded another way."""

    def __init__(
        self,
        target: Target,
        draft: tuple[ReplicaPool | LocalDraft, TokenizerSpec] | None,
        client: Client,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        overlap: bool = True,
        parallel: int = PARALLEL,
        models: Mapping[str, Any] | None = None,
        train_problems: frozenset[str] = frozenset(),
        calibration: Calibration | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.target = target.language
        self.draft = draft[1] if draft is not None else None
        self.threshold = check_threshold(threshold)
        self.parallel = parallel
        self.controller = Controller()
        self.adaptive = True
        self.pair_wrapper: PairWrapper = identity
        self.falls_back = True
        self.train_problems, self.calibration = train_problems, calibration
        self._models = dict(models or {})
        self.running = 0
        self._target, self._drafts, self._client = target, draft, client
        self._shares_tokens = self.draft is not None and share_tokens(self.draft, self.target)
        self._overlap = overlap
        self.processes = processes
        self._runner = asyncio.Runner()

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        adapter: str | Path | None = None,
        *,
        target_url: Urls = (),
        draft_url: Urls = (),
        zero_shot: bool = False,
        threshold: float | None = None,
        cut_policy: CutPolicy | None = None,
        calibration: str | Path | None = None,
        template_options: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        overlap: bool | None = None,
        parallel: int = PARALLEL,
        patience_s: float | None = None,
        local_draft: bool | None = None,
        target_options: Mapping[str, Any] | None = None,
        draft_options: Mapping[str, Any] | None = None,
        expected: GenerationSettings | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Coordinator:
        """Names as in `ParseEngine.from_pretrained`.

        Args:
            target_url, draft_url: the servers of each, one or several; without any, one is started, and ends with
                `close`. Those of the target run with the plugin and this adapter
                (`parse_infer.vllm_plugin.options`), or with `zero_shot` are any that give log-probabilities; without a
                draft model too, one that is started is as vLLM comes.
            local_draft: the draft model runs in this process, without a server. None: where it has no address and no
                options, lies in a folder and has at most 32 MiB of weights, and there is no GPU.
            target_options, draft_options: more options of vLLM for servers that are started, by their names in
                `vllm.LLM`.
            overlap: None: unless both models run here on a CPU, whose cores the draft then needs.
            expected: settings of the requests to come: what is wrong with them is said before a server is started.
            tell: called with a line about the servers that are started.
            api_key: of the servers, also of those that are started; None: the variable VLLM_API_KEY, as vLLM has it.
            patience_s: how long a request waits while no server answers; None: 2 minutes, and for servers that are
                started here as long as they may take to start again.

        Raises:
            OSError: something is missing, or no server of a model answers.
            ValueError: parts do not belong together, or a server is not what it should be.
        """
        if threshold is not None:
            check_threshold(threshold)
        parts = find_parts(
            target,
            draft,
            adapter,
            zero_shot=zero_shot,
            cut_policy=cut_policy,
            calibration=calibration,
            template_options=template_options,
            target_url=target_url,
            draft_url=draft_url,
            local_draft=local_draft,
            target_options=target_options,
            draft_options=draft_options,
            api_key=api_key or os.environ.get("VLLM_API_KEY"),
            patience_s=patience_s,
            expected=expected,
            tell=tell,
        )
        threshold = next(t for t in (threshold, parts.threshold, DEFAULT_THRESHOLD) if t is not None)
        coordinator = cls(
            parts.target,
            parts.draft,
            parts.client,
            threshold=threshold,
            overlap=not parts.share_cores if overlap is None else overlap,
            parallel=parallel,
            models=parts.models,
            train_problems=parts.train_problems,
            calibration=parts.calibration,
            processes=parts.processes,
        )
        try:
            coordinator.run(coordinator.handshake())
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    async def handshake(self) -> None:
        """Learn what the servers serve, and whether they can judge. Raises as `from_pretrained` does."""
        for servers, language in self._known():
            servers.examine = partial(self._examine, servers, language)
            await servers.handshake()
            language.window = min(language.window, servers.identity.window or language.window)
        await self.aclose()  # requests may come from another event loop

    async def _examine(self, servers: ReplicaPool, language: TokenizerSpec, server: Server) -> None:
        """ValueError where a server that has come, or has come back, is not what it should be."""
        await servers.identity.check_tokens(language.name, language.tokenizer, server)
        if servers is self._target.servers and isinstance(self._target.questions, TrainedQuestions) and server.judges:
            await self._target.try_judge(server)

    @property
    def servers(self) -> dict[str, ReplicaPool]:
        """By role: "target", and "draft" where servers draft."""
        return {servers.role: servers for servers, _ in self._known()}

    def _known(self) -> list[tuple[ReplicaPool, TokenizerSpec]]:
        found = [(self._target.servers, self._target.language)]
        if self._drafts is not None and isinstance(self._drafts[0], ReplicaPool):
            found.append((self._drafts[0], self._drafts[1]))
        return found

    def check_calibration(self) -> None:
        """ValueError unless the calibration was made with these models."""
        if self.calibration is not None:
            self.calibration.check(self._models)

    def describe(self) -> dict[str, Any]:
        """Which models answer, as far as names tell: what a server serves under one is its operator's word."""
        return dict(self._models)

    def describe_drafters(self) -> dict[str, Any]:
        """Who guesses tokens: only what a draft left, and the target's server itself."""
        return {}

    def describe_machine(self) -> dict[str, Any]:
        """Of the coordinator."""
        return describe_machine(torch.device("cpu"))

    def clear_caches(self) -> None:
        """Nothing in the servers' caches makes the next answer faster."""
        self.fields(**{**self._target.servers.fields, "cache_salt": uuid.uuid4().hex})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        draft_text: str | Sequence[str] | None = None,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """As `ParseEngine.generate`; several prompts are answered at the same time."""
        batch, is_list = as_batch(prompts)
        texts = with_drafts(batch, is_list, draft_text)
        found = list(self.generate_iter(batch, self._settings(settings, overrides), texts))
        return found if is_list else found[0]

    def generate_target(
        self, prompts: Prompt | Sequence[Prompt], settings: GenerationSettings | None = None, **overrides: Any
    ) -> Generation | list[Generation]:
        """The target alone."""
        batch, is_list = as_batch(prompts)
        found = list(self.generate_iter(batch, self._settings(settings, overrides), alone=True))
        return found if is_list else found[0]

    def generate_iter(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationSettings | None = None,
        draft_texts: Sequence[str | None] | None = None,
        alone: bool = False,
    ) -> Iterator[Generation]:
        """Answers in the order of the prompts, each as soon as it and those before it are there; `parallel` of them
        are under way. Raises as `generate` does, for all prompts before the first is answered."""
        texts = draft_texts or [None] * len(prompts)
        prepared = [
            self.events(prompt, settings, text, alone, watched=False)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

        async def start() -> list[asyncio.Task[Generation]]:
            room = asyncio.Semaphore(self.parallel)

            async def answer(events: AsyncGenerator[Event, None]) -> Generation:
                async with room, aclosing(events):
                    *_, done = [event async for event in events]
                assert isinstance(done, Done)
                return done.generation

            return [asyncio.create_task(answer(events)) for events in prepared]

        tasks = self.run(start())
        try:
            for task in tasks:
                yield task.result() if task.done() else self.run(_result(task))
        finally:
            self.run(_cancelled(tasks))

    def stream(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        draft_text: str | None = None,
        **overrides: Any,
    ) -> Iterator[Event]:
        """As `ParseEngine.stream`."""
        return self._stepped(self.events(prompt, self._settings(settings, overrides), draft_text))

    def check(
        self, prompt: Prompt, settings: GenerationSettings, draft_text: str | None = None, alone: bool = False
    ) -> None:
        """Raises ValueError for what `events` would refuse."""
        self._prepare(prompt, settings, draft_text, alone)

    def read_draft(self, text: str, prompt: Prompt, target: TokenizerSpec) -> TextDrafter:
        """A draft for `events`, in tokens of the target, or of a copy of it for another thread.

        Raises ValueError for an empty one.
        """
        return TextDrafter(text, target, prompt)

    def events(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        draft_text: str | TextDrafter | None = None,
        alone: bool = False,
        watched: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """What happens while a prompt is answered, `Done` last; for callers with an event loop of their own.

        Args:
            draft_text: a draft to use, or what `read_draft` has made of it.
            alone: by the target, without a draft.
            watched: False: the target's tokens come all at once, which costs less.

        Raises ValueError here for bad settings, an empty prompt or one beyond the target's window; later OSError where
        no server answers.
        """
        settings = settings or GenerationSettings()
        request, drafts = self._prepare(prompt, settings, draft_text, alone)
        adaptive = self.adaptive if settings.adaptive is None else settings.adaptive
        threshold = request.settings.threshold
        assert threshold is not None  # `_prepare` has put in the coordinator's own
        adaptive = adaptive and draft_text is None and not alone and self._target.uses_draft(threshold)
        return self._answered(request, drafts, adaptive, watched)

    async def _answered(
        self, request: Request, drafts: Drafts | None, adaptive: bool, watched: bool
    ) -> AsyncGenerator[Event, None]:
        self.running += 1
        request.start()
        try:
            with self.controller.answering(self.running) if adaptive else nullcontext() as answer:
                if answer is not None and not answer.drafted:
                    drafts = None
                with self._target.servers.acquire(judging=drafts is not None) as at:
                    async with aclosing(self._writing(request, drafts, at, watched)) as events:
                        async for event in events:
                            yield event
                generation = request.result()
                # Nothing is known about drafts from an empty one (the prompt is beyond the draft model's window), nor
                # from one that could not be judged.
                drafted = generation.stats.draft_tokens and request.fallback is None
                if answer is not None and (drafted or not answer.drafted):
                    tokens = len(generation.token_ids)
                    self.controller.note(answer, generation.timings.work_s, tokens, self.running, kept=request.kept)
        finally:
            self.running -= 1
        yield Done(generation)

    async def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """A chat request that the target's server answers by itself: its completion, or with `stream` its chunks.

        Raises OSError where no server answers, and ValueError for what it refuses.
        """
        switches = {**self.target.template_options, **fields.get("chat_template_kwargs", {})}
        if switches:
            fields = fields | {"chat_template_kwargs": switches}
        self.running += 1
        try:
            async with aclosing(self._target.servers.relayed("/v1/chat/completions", fields)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.running -= 1

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something that uses `events`, on the coordinator's own event loop."""
        return self._runner.run(work)

    def fields(self, **fields: Any) -> None:
        """Fields of every request to the servers from now on, such as vLLM's `cache_salt` or `priority`."""
        for servers, _ in self._known():
            servers.fields = fields

    async def aclose(self) -> None:
        """`close` from within the event loop that has asked."""
        self._target.servers.close()
        if self._drafts is not None:
            self._drafts[0].close()
        await self._client.close()

    def close(self) -> None:
        """Nothing is asked any more; what was started for this is stopped."""
        try:
            with suppress(RuntimeError):  # closed already
                self._runner.run(self.aclose())
                self._runner.close()
        finally:
            if self.processes is not None:
                self.processes.stop()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _writing(
        self,
        request: Request,
        drafts: Drafts | None,
        at: Lease,
        watched: bool,
    ) -> AsyncGenerator[Event, None]:
        """With drafts the rounds, else the target alone."""
        if drafts is None:
            async with aclosing(self._target.written(request, 1, at, watched)) as tokens:
                async for token in tokens:
                    request.stats.target_forwards += 1
                    yield Resumed(1, request.answer.add([token], "target"), token)
                    if request.answer.is_finished:
                        return
            return
        threshold = request.settings.threshold
        assert threshold is not None  # `_prepare` has put in the coordinator's own
        # What stands in between may give parts of this answer to a request with other settings, so the draft is to be
        # whole, and there, and each of the target's tokens has a time.
        alone = self.pair_wrapper is identity
        falls_back = self.falls_back and alone
        patience_s = 0.0 if falls_back else None
        with drafts[0].acquire(patience_s) if isinstance(drafts, tuple) else nullcontext() as draft_at:
            overlap, watched = self._overlap and alone, watched or not alone
            pair = ServerModelPair(
                self._target, drafts, request, threshold, at, draft_at, overlap, watched, falls_back
            )
            try:
                async with aclosing(speculate(self.pair_wrapper(pair, request), request)) as events:
                    async for event in events:
                        yield event
            finally:
                await pair.close()

    def _prepare(
        self, prompt: Prompt, settings: GenerationSettings, draft_text: str | TextDrafter | None, alone: bool
    ) -> tuple[Request, Drafts | None]:
        """Everything that can be wrong with a request is found here."""
        if settings.risk is not None and draft_text is not None:
            raise ValueError("risk and draft_text were both given: a promise covers only what the draft model writes")
        settings = servable(settings, self.calibration, self._models)
        if settings.threshold is None:
            settings = settings.override(threshold=self.threshold)
        request = Request(prompt, self.target, settings, settings.resume_sampling)
        if alone:
            return request, None
        if isinstance(draft_text, TextDrafter):
            return request, draft_text
        if draft_text is not None:
            return request, TextDrafter(draft_text, self.target, request.prompt)
        if self._drafts is None:
            raise ValueError("there is no draft model: give one, or a draft_text")
        servers, language = self._drafts
        translation = CrossTokenizerDraft(language, self.target, self._shares_tokens, request.prompt, settings.stop)
        return request, (servers, translation)

    def _settings(self, settings: GenerationSettings | None, overrides: Mapping[str, Any]) -> GenerationSettings:
        return (settings or GenerationSettings()).override(**overrides)

    def _stepped(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        async def step() -> Event | None:
            return await anext(events, None)

        async def end() -> None:
            await events.aclose()

        try:
            while (event := self.run(step())) is not None:
                yield event
        finally:
            self.run(end())


async def _result(task: asyncio.Task[Generation]) -> Generation:
    return await task


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
