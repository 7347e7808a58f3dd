"""Backend with the target on servers, and the draft model on servers or in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from parse_infer.backends.pool.client import RequestRejected
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.backends.pool.sessions import Sessions
from parse_infer.backends.servers.logprob_reads import LogprobReads
from parse_infer.backends.servers.options import PARALLEL
from parse_infer.backends.servers.pair import Drafts, ServerModelPair, source_kind
from parse_infer.backends.servers.parts import Parts, check_servable
from parse_infer.backends.servers.text_draft import CHAT, TextApi, TextDraft, find_text_api
from parse_infer.backends.servers.zero_shot_requests import ZeroShotRequests
from parse_infer.calibration.schema import Calibration
from parse_infer.decoding.block_length import REPLAYED, BlockLength
from parse_infer.decoding.loop import PairWrapper, speculate_in_phases
from parse_infer.decoding.plan import Judging, Plan
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft
from parse_infer.drafters.model_drafter import share_tokens, with_template
from parse_infer.drafters.text import TextDrafter
from parse_infer.errors import PromptError, ServerError
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Verdict, looks_ahead
from parse_infer.models.environment import describe_machine
from parse_infer.request.events import Event, Resumed
from parse_infer.request.request import Request
from parse_infer.settings.acceptance import ACCEPT_NOTHING
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.text.conversation import Conversation
from parse_infer.text.cuts import Segmenter
from parse_infer.text.detokenizer import without_special_tokens
from parse_infer.text.tokenizer_spec import TokenizerSpec

T = TypeVar("T")


class ServerBackend:
    """A stateless `Backend`: any number of engines may share the servers.

    Answers equal those of a `LocalBackend` up to the servers' rounding; with the zero-shot judge, one with
    `keep_greedy_match=False`. Sampled answers use other random numbers.

    Attributes:
        falls_back: if no draft server answers or the judge fails, the target answers alone at once
            (`Generation.fallback`). False (for measurements): such a request fails, after `patience_s`.
    """

    adaptive = True
    deterministic = False  # rounding depends on the server's batch

    def __init__(self, parts: Parts, parallel: int = PARALLEL) -> None:
        self._target, self._drafts, self._models = parts.target, parts.draft, dict(parts.models)
        self.target: TokenizerSpec = parts.target.language
        draft = None if parts.draft is None else parts.draft[1]
        self.draft = None if draft is None else with_template(draft, self.target)
        self.threshold, self.calibrations = parts.threshold, parts.calibrations
        self.train_problems, self.processes = parts.train_problems, parts.processes
        self.parallel, self.falls_back = parallel, True
        self._shares_tokens = self.draft is not None and share_tokens(self.draft, self.target)
        self._text_api: TextApi | None = None  # of the draft servers; None: they take and return token ids
        self._lengths: defaultdict[int, BlockLength] = defaultdict(BlockLength)  # by `Plan.measured_as`
        self._sessions = Sessions()
        self._runner = asyncio.Runner()
        self._one = threading.Lock()  # of the threads that use the loop

    async def handshake(self) -> None:
        """Check models, tokenizers and judges of all servers. Raises as `from_pretrained` does."""
        self._target.servers.recognise = self._target.recognise
        for servers, language in self._known():
            servers.examine = partial(self._examine, servers, language)
            await servers.handshake()
            if language is not None:
                language.window = min(language.window, servers.identity.window or language.window)
            if self._models.get(servers.role, "") is None:
                self._models[servers.role] = servers.model
        await self.aclose()  # requests may use another event loop

    async def _examine(self, servers: ReplicaPool, language: TokenizerSpec | None, server: Replica) -> None:
        """Raise ValueError if a new or recovered server has the wrong tokenizer, or cannot judge or draft."""
        if servers is not self._target.servers:
            text_api = await find_text_api(servers, server, language)
            if text_api is not None and len(servers.identity.names) > 1:
                names = ", ".join(servers.identity.names[:12])
                raise ServerError(f"the draft server {server.url} serves several models: set draft to one of {names}")
            if any(other.examined and other is not server for other in servers.members) and text_api != self._text_api:
                raise ServerError(f"the draft server {server.url} takes prompts unlike the others: use one kind")
            self._text_api = text_api
            if text_api is not None:
                without_special_tokens(self.target.tokenizer)  # now, not during the first answer
                return
        assert language is not None
        await servers.identity.check_tokens(language.name, language.tokenizer, server)
        if servers is self._target.servers:
            await self._target.try_judge(server)

    @property
    def servers(self) -> dict[str, ReplicaPool]:
        """Replicas by role: "target", and "draft" if servers run the draft model."""
        return {servers.role: servers for servers, _ in self._known()}

    def _known(self) -> list[tuple[ReplicaPool, TokenizerSpec | None]]:
        known: list[tuple[ReplicaPool, TokenizerSpec | None]] = [(self._target.servers, self._target.language)]
        if self._drafts is not None and isinstance(self._drafts[0], ReplicaPool):
            known.append((self._drafts[0], self._drafts[1]))
        return known

    @property
    def tokens_after_draft(self) -> int:
        return self._target.tokens_after_draft

    @property
    def strict_tokens(self) -> int:
        """Two, unless the draft servers only answer chats: they cannot continue what the target has written."""
        return 0 if self._text_api is not None and self._text_api.path == CHAT else 2

    def describe(self) -> dict[str, Any]:
        """Names of the models. The operator of a server answers for the weights behind a name."""
        return dict(self._models)

    def describe_drafters(self) -> dict[str, Any]:
        """Empty: the vLLM server may run its own token drafter."""
        return {}

    def describe_machine(self) -> dict[str, Any]:
        """Hardware of this process, not of the servers."""
        return describe_machine(torch.device("cpu"))

    def load(self, running: int) -> int:
        return self._target.servers.load(running)

    def check(self, settings: GenerationSettings, calibrations: Sequence[Calibration]) -> None:
        check_servable(settings, calibrations, exact=self._target.reads is not None)

    def replayable(self, length: BlockTokens) -> BlockTokens:
        reads = self._target.reads
        as_text = self._text_api is not None and self._text_api.ends_blocks
        varies = reads is not None and (as_text or looks_ahead(reads.judge))
        return REPLAYED if length == "auto" and varies else length

    @property
    def judge(self) -> LogprobReads | ZeroShotRequests | None:
        reads = self._target.reads
        return self._target.questions if reads is None or reads.judge is None else reads

    @property
    def segmenter(self) -> Segmenter:
        return self._target.segmenter

    def lossless(self, settings: GenerationSettings) -> GenerationSettings:
        if settings.resume_sampling.greedy and self._target.reads is not None:
            return settings.override(mode="exact")
        return settings.override(threshold=ACCEPT_NOTHING)  # the target alone

    def draft_source(self, request: Request, draft_text: str | TextDrafter | None) -> Drafts | PromptError:
        if isinstance(draft_text, TextDrafter):
            return draft_text
        if draft_text is not None:
            return TextDrafter(draft_text, self.target, request.prompt)
        if self._drafts is None:
            raise ServerError("the engine has no draft model: give draft=… or a draft_text")
        servers, language = self._drafts
        stop = request.settings.stop
        try:
            if isinstance(servers, ReplicaPool) and self._text_api is not None:
                window = servers.identity.window
                return servers, TextDraft(self._text_api, language, self.target, request.prompt, stop, window)
            assert language is not None
            return servers, CrossTokenizerDraft(language, self.target, self._shares_tokens, request.prompt, stop)
        except PromptError as error:  # the target has rendered the prompt
            return error

    def plan(self, request: Request, source: Drafts, *, streamed: bool, replayed: bool) -> Plan:
        judging: Judging | None = None if self.judge is None else "cut" if self._target.reads is None else "token"
        planned = partial(
            Plan.of,
            source=source_kind(source),
            judging=judging,
            streamed=streamed,
            replayed=replayed,
            falls_back=self.falls_back,
        )
        plan, settings = planned(request.settings), request.settings
        return replace(plan, answer=planned(self.lossless(settings))) if settings.strict_answer else plan

    async def with_draft(
        self, request: Request, plan: Plan, source: Drafts, wrap: PairWrapper | None
    ) -> AsyncGenerator[Event, None]:
        session = self._sessions.of_prompt(request.prompt)
        with (
            self._target.servers.acquire(session=session) as at,
            source[0].acquire(plan.falls_back, session=session)
            if isinstance(source, tuple)
            else nullcontext() as draft_at,
        ):
            pairs = [
                ServerModelPair(self._target, source, request, each, at, draft_at, self._lengths[each.measured_as])
                for each in plan.phases
            ]
            try:
                wrapped = pairs if wrap is None else [wrap(pair, request) for pair in pairs]
                events = speculate_in_phases(wrapped, request)
                async with aclosing(events):
                    async for event in events:
                        yield event
            finally:
                for pair in pairs:
                    await pair.close()

    async def alone(self, request: Request, speculate: bool, streamed: bool) -> AsyncGenerator[Event, None]:
        with self._target.servers.acquire(session=self._sessions.of_prompt(request.prompt)) as at:
            async with aclosing(self._target.written(request, at, streamed)) as tokens:
                async for token in tokens:
                    request.count_forwards(target=1)
                    yield Resumed(1, request.answer.add([token], "target"), token)
                    if request.answer.is_finished:
                        return

    def draft_alone(self, request: Request) -> AsyncGenerator[Event, None]:
        raise ServerError("generate_draft needs the local backend: send the request to the draft server instead")

    async def judge_text(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int] | None) -> Verdict:
        cuts = self._target.segmenter.cuts(draft) if cuts is None else cuts
        with self._target.servers.acquire() as at:
            if self._target.reads is not None:
                n = len(context) + len(draft)
                if n > self._target.reads.max_tokens:
                    raise ServerError(
                        f"prompt and response have {n} tokens, but one read of log-probabilities has at most "
                        f"{self._target.reads.max_tokens}: shorten the response"
                    )
                return await self._target.read(context, draft, cuts, Carried(), (), at)
            return await self._target.ask(context, draft, cuts, at)

    async def relay(self, request: PassedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Pass a request on to a target server; yield the head of its response, then the body, all unchanged.

        The body's bytes are changed only where the target's server must find another model name, no `parse`, or
        this engine's options of the chat template. A chat goes where its turn before went.

        Raises OSError if no server answers, and ValueError if the server rejects our key or address.
        """
        servers = self._target.servers
        try:
            sent, conversation = request, None
            if request.fields is not None:
                sent = replace(request, body=self._passed_body(request.body, request.fields))
                conversation = _conversation(request.fields)
            session = self._sessions.of(conversation)
        except RecursionError as error:
            raise RequestRejected("the body is nested too deeply", status=400) from error
        with servers.acquire(session=session) as lease:
            async with aclosing(servers.passed(sent, lease)) as pieces:
                async for piece in pieces:
                    yield piece

    def _passed_body(self, body: bytes, fields: Mapping[str, Any]) -> bytes:
        own_name = {"model": self._target.servers.model}
        sent = {name: value for name, value in fields.items() if name != "parse"} | own_name
        own = fields.get("chat_template_kwargs") or {}
        if self.target.template_options and "messages" in fields and isinstance(own, Mapping):
            sent["chat_template_kwargs"] = {**self.target.template_options, **own}
        return body if sent == fields else json.dumps(sent).encode()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this backend's event loop. Other threads wait.

        Beside another event loop, such as a notebook's, it runs in a thread of its own.
        """
        running = _running_loop()
        if running is None:
            with self._one:
                return self._runner.run(work)
        if running is self._runner.get_loop():
            work.close()
            raise RuntimeError("the event loop of this engine runs already: await `events` there")
        doing: list[asyncio.Task[Any] | None] = []

        async def interruptible() -> T:
            doing.append(asyncio.current_task())
            return await work

        def alone() -> T:
            with self._one:
                return self._runner.run(interruptible())

        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(alone)
            try:
                return result.result()
            except KeyboardInterrupt:
                for task in filter(None, doing):
                    self._runner.get_loop().call_soon_threadsafe(task.cancel)
                raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        loop = self._runner.get_loop()
        if loop.is_running():  # in another thread, or here, where the garbage collector closes a stream
            asyncio.run_coroutine_threadsafe(work, loop)
        else:
            self.run(work)

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def clear_caches(self) -> None:
        """Make new requests miss the servers' prefix caches. Servers that draft as text keep theirs: they may refuse
        vLLM's `cache_salt`."""
        salt = uuid.uuid4().hex
        for servers, _ in self._known():
            if servers is self._target.servers or self._text_api is None:
                servers.fields = servers.fields | {"cache_salt": salt}

    async def aclose(self) -> None:
        """Close connections and health checks from within the event loop that runs the requests."""
        await self._target.servers.aclose()
        if self._drafts is not None:
            await self._drafts[0].aclose()

    def close(self) -> None:
        """Close all connections and stop the servers that this backend started."""
        try:
            with suppress(RuntimeError):  # already closed
                self.run(self.aclose())
                if _running_loop() is None:
                    self._runner.close()
                else:
                    with ThreadPoolExecutor(1) as thread:
                        thread.submit(self._runner.close).result()
        finally:
            if self.processes is not None:
                self.processes.stop()


def _conversation(fields: Mapping[str, Any]) -> Conversation | None:
    """The conversation of a body: of chats, of `/v1/messages`, or of `/v1/responses` with a list of items."""
    messages = fields.get("messages", fields.get("input"))
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        return None
    return Conversation.of_messages(messages)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
