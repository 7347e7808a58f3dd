"""The target of answers over servers: its replicas, its judge, and the requests to them."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from parse_infer.backends.pool.client import RequestRejected, TransientServerError
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import Failing, Lease
from parse_infer.backends.servers.cached_read_check import CachedReadCheck
from parse_infer.backends.servers.dialects.dialect import Dialect
from parse_infer.backends.servers.logprob_reads import LogprobReads, ServerVerdict
from parse_infer.backends.servers.zero_shot_requests import ZeroShotRequests
from parse_infer.errors import ServerError
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Verdict
from parse_infer.request.request import Request
from parse_infer.settings.sampling import Sampling, seed_of
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_infer.text.tokenizer_spec import TokenizerSpec

log = logging.getLogger("parse_infer.backends")

RECOGNISE_EVERY_S = 60.0
_RECOGNISE_LIMIT_S = 2.0  # failed requests may wait for the health check that this is a part of


class Target:
    """The target's replicas and the requests to them.

    Args:
        judge: None: the target only writes.

    Attributes:
        reads: judges drafts by log-probabilities.
        questions: judges drafts by questions to the target.
        segmenter: finds the cuts that the local backend judges.
        tokens_after_draft: number of tokens that the window must leave free after a draft.
    """

    def __init__(
        self,
        language: TokenizerSpec,
        servers: ReplicaPool,
        judge: LogprobReads | ZeroShotRequests | None,
        cut_policy: CutPolicy,
    ) -> None:
        self.reads = judge if isinstance(judge, LogprobReads) else None
        self.questions = judge if isinstance(judge, ZeroShotRequests) else None
        self.language = language
        self.servers = servers
        tokens_per_cut = 0 if self.questions is None else self.questions.tokens_per_cut
        self.segmenter = Segmenter(language.tokenizer, cut_policy, tokens_per_cut)
        self.tokens_after_draft = 0 if judge is None else tokens_per_cut + 1

    async def ask(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int], lease: Lease) -> Verdict:
        """Ask the target about the draft at all cuts, in one request. Raises ValueError for a malformed answer, and
        the errors of `ReplicaPool.ask`."""
        assert self.questions is not None
        body = self.questions.request(context, draft, cuts)
        validity = self.questions.validities(await self.servers.ask(body, lease), len(cuts))
        return Verdict(cuts=list(cuts), validity=validity)

    async def read(
        self,
        context: Sequence[int],
        draft: Sequence[int],
        cuts: Sequence[int] | None,
        carried: Carried,
        written: Sequence[int],
        lease: Lease,
    ) -> ServerVerdict:
        """Judge a draft in a worker thread. `cuts` to `written` are those of `LogprobReads.verdict`. Raises as `ask`.

        A server that `reads_cache` reads the draft only. Where its cache holds a part of the draft too, it has no
        scores of that part. Then it reads all again, under a `cache_salt` of its own if the context is long.
        """
        assert self.reads is not None
        ids = [*context, *draft]
        judge = partial(self._judge, draft=draft, cuts=cuts, carried=carried, written=written)
        if lease.server.reads_cache:
            read = await self._read_cached(context, ids, lease)
            if read is None and len(ids) > self.reads.max_tokens:
                lease.cache_salt = uuid.uuid4().hex
                await self.prefill(context, lease)
                read = await self._read_cached(context, ids, lease)
            if read is not None:
                try:
                    return await asyncio.to_thread(judge, *read)
                except ServerError as error:  # its answers have changed since the handshake
                    lease.server.reads_cache = False
                    log.warning("the target server %s is read without its prefix cache: %s", lease.server.url, error)
        if len(ids) > self.reads.max_tokens:
            raise ServerError(f"no target server reads more than {self.reads.max_tokens} tokens")
        dialect = lease.server.dialect  # the answer may move to a server of another engine
        body, path = dialect.read(ids, self.reads.k)
        response = await self.servers.ask(body, lease, path=path)
        return await asyncio.to_thread(judge, dialect, response)

    def _judge(
        self,
        dialect: Dialect,
        response: object,
        draft: Sequence[int],
        cuts: Sequence[int] | None,
        carried: Carried,
        written: Sequence[int],
    ) -> ServerVerdict:
        assert self.reads is not None
        return self.reads.verdict(dialect.parse(response, draft, self.reads.k), cuts, carried, written)

    async def _read_cached(
        self, context: Sequence[int], ids: Sequence[int], lease: Lease
    ) -> tuple[Dialect, object] | None:
        """The response with the scores of all tokens after the context, and its dialect; None without such scores."""
        assert self.reads is not None
        dialect = lease.server.dialect
        body, path = dialect.cached_read(ids, len(context) - 1, self.reads.k)
        try:
            response = await self.servers.ask(body, lease, path=path)
        except RequestRejected:
            if lease.server.dialect.read(ids, self.reads.k).path == path:
                raise  # the server would reject an uncached read too
            return None  # the answer has moved to a server without cached reads
        cached = dialect.cached_tokens(response)  # the last of them has the scores of the token after it
        return (dialect, response) if cached is not None and cached < len(context) else None

    async def prefill(self, context: Sequence[int], lease: Lease) -> None:
        """Let the server read a text into its cache, but for the last token: a read needs its state."""
        prompt = list(context[:-1] or context)
        await self.servers.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0}, lease)

    async def try_judge(self, server: Replica) -> None:
        """Raise ValueError if this server cannot judge a draft, TransientServerError if it does not answer."""
        if self.reads is None:
            return
        dialect = server.dialect
        if not dialect.reads_prompts:
            raise ServerError(
                f"the target server {server.url} runs {dialect.name}, which returns no log-probabilities of prompts: "
                "give a vLLM or SGLang server, and this one as draft server"
            )
        await self._read_known_text(self.reads, server)
        server.reads_cache = await CachedReadCheck(self.servers, server, self.reads, self.language.window).passes()

    async def recognise(self, server: Replica) -> None:
        """Raise ValueError if an examined server runs another model by now, as after an update of its weights.

        It is asked every `RECOGNISE_EVERY_S`. A server that is too busy to answer is asked again at its next check.
        """
        due = server.recognised_at + RECOGNISE_EVERY_S
        if self.reads is None or not server.examined or time.monotonic() < due:
            return
        with suppress(TimeoutError, TransientServerError, RequestRejected):
            async with asyncio.timeout(_RECOGNISE_LIMIT_S):
                await self._read_known_text(self.reads, server)

    async def _read_known_text(self, reads: LogprobReads, server: Replica) -> None:
        """Raise as `LogprobReads.check` and `ReplicaPool.ask_one` do."""
        known = await self.servers.ask_one(server, *server.dialect.read(reads.reference, reads.k))
        reads.check(known, server.dialect, server.url)
        server.recognised_at = time.monotonic()

    async def written(
        self, request: Request, lease: Lease | None, streamed: bool, limit: int = sys.maxsize
    ) -> AsyncGenerator[int, None]:
        """Yield the target's tokens after the answer so far, until the caller stops.

        Args:
            streamed: stream the tokens; else they come all at once, which costs less.
            limit: largest number of tokens.

        Raises Failing if a server ends an unfinished answer without a token.
        """
        most = len(request.answer.ids) + min(limit, request.answer.remaining_tokens)
        while len(request.answer.ids) < most:
            before = len(request.answer.ids)
            async with aclosing(self._written_once(request, lease, streamed, most - before)) as tokens:
                async for token in tokens:
                    yield token
            # A server may have its own limit, such as max_new_tokens in the model's generation_config.json.
            if len(request.answer.ids) == before:
                raise Failing("a target server has ended an answer without a token")

    async def _written_once(
        self, request: Request, lease: Lease | None, streamed: bool, limit: int
    ) -> AsyncGenerator[int, None]:
        # Random numbers of each place, so that an answer does not depend on where its blocks end.
        settings = server_settings(request.sampling, request.answer.end_ids, "target", len(request.answer.ids))
        settings |= end_settings(request, limit)
        if not streamed:
            settings |= stop_settings(request.settings.stop)
        written = self.servers.written(request.context, limit, settings, lease, streamed)
        async with aclosing(written) as pieces:
            while True:
                with request.timed("resume_s"):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                for token in piece:
                    yield token


def stop_settings(stop: Sequence[str]) -> dict[str, Any]:
    """Stop fields of a request whose answer comes all at once."""
    return {"stop": list(stop), "include_stop_str_in_output": True} if stop else {}


def end_settings(request: Request, limit: int) -> dict[str, Any]:
    """End-token fields of a request for up to `limit` tokens, with vLLM's names and meaning.

    The server counts from its first new token.
    """
    settings: dict[str, Any] = {"ignore_eos": True} if request.settings.ignore_eos else {}
    required = min(request.answer.required, limit)
    return settings | ({"min_tokens": required} if required else {})


def server_settings(sampling: Sampling, end_ids: Collection[int], *purpose: object) -> dict[str, Any]:
    """Sampling fields of a completion request. They override the defaults of server and model."""
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # SGLang refuses 0
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_p": 0.0,
        "stop_token_ids": sorted(end_ids),
    }
    if sampling.seed is not None and not sampling.greedy:
        settings["seed"] = seed_of(sampling.seed, *purpose)
    return settings
