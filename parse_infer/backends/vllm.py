"""A target on vLLM servers, and a draft model on servers or in this process; any number of answers at a time."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from parse_infer.backends.client import Client
from parse_infer.backends.factory import Urls, check_servable, find_parts
from parse_infer.backends.health import Server
from parse_infer.backends.local_draft import LocalDraft
from parse_infer.backends.replicas import ReplicaPool
from parse_infer.backends.server_pair import Drafts, Scores, ServerModelPair, Target
from parse_infer.backends.supervisor import Supervisor
from parse_infer.calibration.schema import Calibration
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft
from parse_infer.drafters.draft_model import share_tokens
from parse_infer.drafters.text import TextDrafter
from parse_infer.events import Event, Resumed
from parse_infer.judge.cuts import CutPolicy
from parse_infer.loop import PairWrapper, identity, speculate
from parse_infer.models.environment import describe_machine
from parse_infer.models.tokenizer_spec import TokenizerSpec
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings
from parse_infer.vllm_plugin.validity_requests import TrainedQuestions

PARALLEL = 64  # answers under way at the same time
T = TypeVar("T")


def connect_backend(
    target: str | Path,
    draft: str | Path | None = None,
    adapter: str | Path | None = None,
    *,
    target_url: Urls = (),
    draft_url: Urls = (),
    zero_shot: bool = False,
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
) -> VLLMBackend:
    """Connect to servers, or start them; the arguments of `ParseEngine.from_pretrained` with backend="vllm".

    Args:
        target_url, draft_url: the servers of each model, one or several. Without any, one is started, and ends with
            `close`. Target servers run with the plugin and this adapter (`parse_infer.vllm_plugin.options`); with
            `zero_shot`, any server that returns log-probabilities. A target server that is started without adapter
            and draft model is a stock server.
        local_draft: the draft model runs in this process, without a server. None: if it has no address and no options,
            lies in a folder and has at most 32 MiB of weights, and there is no GPU.
        target_options, draft_options: more options of vLLM for servers that are started, by their names in `vllm.LLM`.
        overlap: verify segments while the draft is written; changes no answer. None: unless both models run here on a
            CPU, whose cores the draft then needs.
        parallel: answers that `generate` and `collect` keep under way.
        expected: settings of the requests to come: errors in them are raised before a server is started.
        tell: called with a line about the servers that are started.
        api_key: of the servers, also of those that are started; None: the variable VLLM_API_KEY, as vLLM has it.
        patience_s: how long a request waits while no server answers; None: 2 minutes, and for servers that are
            started here as long as they may take to start again.

    Raises:
        OSError: something is missing, or no server of a model answers.
        ValueError: parts do not belong together, or a server does not serve what it should.
    """
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
    backend = VLLMBackend(
        parts.target,
        parts.draft,
        parts.client,
        threshold=parts.threshold,
        overlap=not parts.share_cores if overlap is None else overlap,
        parallel=parallel,
        models=parts.models,
        train_problems=parts.train_problems,
        calibration=parts.calibration,
        processes=parts.processes,
    )
    try:
        backend.run(backend.handshake())
    except BaseException:
        backend.close()
        raise
    return backend


class VLLMBackend:
    """A `Backend` that keeps nothing of a request: any number of engines may share the servers.

    Answers are those of a `LocalBackend` with `exact_tail=False`, up to the servers' rounding; sampled answers have
    other random numbers.

    Args:
        target: the servers whose quality is kept.
        draft: the draft model's servers, or the model in this process, and its tokenizer; None if drafts come as text.
        threshold: the judge's calibrated threshold.
        overlap: verify segments while the draft is written.
        models: names of the models; see `describe`.
        processes: servers that were started for this backend, and end with `close`.

    Attributes:
        falls_back: without a draft server, or where a draft cannot be judged, the target answers alone at once
            (`Generation.fallback`). False, for measurements: such a request fails, after `patience_s`.
    """

    adaptive = True
    deterministic = False  # rounding depends on the requests that a server computes at the same time

    def __init__(
        self,
        target: Target,
        draft: tuple[ReplicaPool | LocalDraft, TokenizerSpec] | None,
        client: Client,
        *,
        threshold: float | None = None,
        overlap: bool = True,
        parallel: int = PARALLEL,
        models: Mapping[str, Any] | None = None,
        train_problems: frozenset[str] = frozenset(),
        calibration: Calibration | None = None,
        processes: Supervisor | None = None,
    ) -> None:
        self.target: TokenizerSpec = target.language
        self.draft: TokenizerSpec | None = draft[1] if draft is not None else None
        self.threshold = threshold
        self.parallel = parallel
        self.falls_back = True
        self.train_problems, self.calibration = train_problems, calibration
        self.processes = processes
        self.overlap = overlap
        self._models = dict(models or {})
        self._target, self._drafts, self._client = target, draft, client
        self._shares_tokens = self.draft is not None and share_tokens(self.draft, self.target)
        self._runner = asyncio.Runner()

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

    @property
    def probe_tokens(self) -> int:
        return self._target.probe_room

    def describe(self) -> dict[str, Any]:
        """Names only: what a server serves under a name is its operator's responsibility."""
        return dict(self._models)

    def describe_drafters(self) -> dict[str, Any]:
        """None: a server proposes tokens itself, from a rejected draft."""
        return {}

    def describe_machine(self) -> dict[str, Any]:
        """The machine of this process, not of the servers."""
        return describe_machine(torch.device("cpu"))

    def check(self, settings: GenerationSettings, calibration: Calibration | None) -> None:
        check_servable(settings, calibration)

    def require_judge(self) -> Any:
        if self._target.questions is None:
            raise ValueError("This engine has nothing to judge drafts with: pass adapter=… or zero_shot=True.")
        return self._target.questions

    def draft_source(self, request: Request, draft_text: str | TextDrafter | None) -> Drafts:
        if isinstance(draft_text, TextDrafter):
            return draft_text
        if draft_text is not None:
            return TextDrafter(draft_text, self.target, request.prompt)
        if self._drafts is None:
            raise ValueError("there is no draft model: give one, or a draft_text")
        servers, language = self._drafts
        stop = request.settings.stop
        return servers, CrossTokenizerDraft(language, self.target, self._shares_tokens, request.prompt, stop)

    def uses_draft(self, request: Request, source: Drafts) -> bool:
        threshold = request.settings.threshold
        assert threshold is not None  # the engine has put in its own
        return self._target.uses_draft(threshold)

    async def with_draft(
        self, request: Request, source: Drafts, wrap: PairWrapper, watched: bool
    ) -> AsyncGenerator[Event, None]:
        threshold = request.settings.threshold
        assert threshold is not None  # the engine has put in its own
        # A wrapper may give parts of this answer to a request with other settings. So the draft has to be complete and
        # present, and each of the target's tokens needs a time of its own.
        unwrapped = wrap is identity
        falls_back = self.falls_back and unwrapped
        patience_s = 0.0 if falls_back else None
        with (
            self._target.servers.acquire(judging=True) as at,
            source[0].acquire(patience_s) if isinstance(source, tuple) else nullcontext() as draft_at,
        ):
            overlap, watched = self.overlap and unwrapped, watched or not unwrapped
            pair = ServerModelPair(
                self._target, source, request, threshold, at, draft_at, overlap, watched, falls_back
            )
            try:
                async with aclosing(speculate(wrap(pair, request), request)) as events:
                    async for event in events:
                        yield event
            finally:
                await pair.close()

    async def alone(self, request: Request, speculate: bool, watched: bool) -> AsyncGenerator[Event, None]:
        with self._target.servers.acquire() as at:
            async with aclosing(self._target.written(request, 1, at, watched)) as tokens:
                async for token in tokens:
                    request.stats.target_forwards += 1
                    yield Resumed(1, request.answer.add([token], "target"), token)
                    if request.answer.is_finished:
                        return

    def draft_alone(self, request: Request, speculate: bool) -> AsyncGenerator[Event, None]:
        raise ValueError("generate_draft needs the local backend: ask the draft model's server itself")

    async def judge_text(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int] | None) -> Scores:
        cuts = self._target.segmenter.cuts(draft) if cuts is None else cuts
        cuts = self._target.affordable(context, cuts)
        with self._target.servers.acquire(judging=True) as at:
            return Scores(cuts, await self._target.validities(context, draft, cuts, at))

    async def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """A chat request that the target's server answers by itself: its completion, or with `stream` its chunks.

        Raises OSError where no server answers, and ValueError for what it refuses.
        """
        switches = {**self.target.template_options, **fields.get("chat_template_kwargs", {})}
        if switches:
            fields = fields | {"chat_template_kwargs": switches}
        async with aclosing(self._target.servers.relayed("/v1/chat/completions", fields)) as pieces:
            async for piece in pieces:
                yield piece

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the backend's own event loop."""
        return self._runner.run(work)

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def clear_caches(self) -> None:
        """Make new requests miss the servers' prefix caches."""
        self.fields(**{**self._target.servers.fields, "cache_salt": uuid.uuid4().hex})

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
