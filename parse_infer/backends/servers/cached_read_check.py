"""Check of a target server's cached reads: they must equal reads without the prefix cache.

No engine documents the prompt log-probabilities of a prompt whose beginning is cached. vLLM's model runners V1 and V2
differ there, and a judge would accept drafts under false scores.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import torch

from parse_infer.backends.pool.client import RequestRejected, TransientServerError
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.logprob_reads import LogprobReads
from parse_infer.errors import ServerError
from parse_infer.judge.token_logprobs import LOWEST, TokenLogprobs

log = logging.getLogger("parse_infer.backends")

_CONTEXT = 257  # tokens: at least two blocks of a prefix cache, and one more, so that a read begins behind a block
_CACHE_READS = 4  # the first fills the cache; a slow server once needed more than the second
_MEAN = 0.1  # nats: rounding of one server stays below
_LARGEST = 2.0  # nats
_FAILS = (500, 501)  # a server that fails on such a read alone


class CachedReadCheck:
    """The check of one server.

    Args:
        window: context window in tokens.
    """

    def __init__(self, servers: ReplicaPool, server: Replica, reads: LogprobReads, window: int) -> None:
        self._servers, self._server, self._reads = servers, server, reads
        self._dialect = server.dialect
        draft = reads.reference
        # No other request has this context, so that its draft is in no cache.
        size = min(_CONTEXT, window - 1 - len(draft))
        self._context = random.choices(draft, k=max(size, 0))
        self._ids = [*self._context, *draft]

    async def passes(self) -> bool:
        """Whether the server has cached reads and they are right; a warning says what is wrong with them.

        Raises TransientServerError if the server does not answer.
        """
        try:
            fault = await self._find_fault()
        except RequestRejected:  # it has no such path
            return False
        except ServerError as error:
            fault = str(error)
        except TransientServerError as error:
            if error.status not in _FAILS:
                raise
            fault = f"it fails on cached reads ({error.status})"
        if fault:
            log.warning("the target server %s is read without its prefix cache: %s", self._server.url, fault)
        return fault is None

    async def _find_fault(self) -> str | None:
        """What is wrong with cached reads: "" if the server does not cache, None if nothing is."""
        if len(self._context) < 2 or not await self._fill_cache():
            return ""
        responses = [await self._try_read()]  # the context is cached
        uncached = await self._servers.ask_one(self._server, *self._dialect.read(self._ids, self._reads.k))
        responses.append(await self._try_read())  # the draft may be cached too
        if responses == [None, None]:
            return "it refuses cached reads"
        for response in filter(None, responses):
            cached = self._dialect.cached_tokens(response)
            if cached is None:
                return "its cached reads do not say how many tokens came from the cache"
            tail = self._ids[max(len(self._context), cached + 1) :]
            if not tail:
                continue
            reads = (self._dialect.parse(each, tail, self._reads.k) for each in (response, uncached))
            if not _same(*reads):
                return "its cached reads return other log-probabilities than its uncached ones"
        return None

    async def _fill_cache(self) -> bool:
        """Read the context until it is cached. Raises RequestRejected if the server has no cached reads."""
        cached = self._dialect.cached_tokens(await self._read(self._context))
        for _ in range(_CACHE_READS - 1):
            try:
                cached = cached or self._dialect.cached_tokens(await self._read(self._context))
            except RequestRejected:  # see `_try_read`
                return True
        return bool(cached)

    async def _try_read(self) -> object:
        """A cached read of context and draft, or None if the server refuses it.

        vLLM's model runner V1 returns uninitialised memory for cached tokens, and refuses where that is no JSON (400).
        """
        try:
            return await self._read(self._ids)
        except RequestRejected:
            return None

    async def _read(self, ids: Sequence[int]) -> object:
        start = min(len(self._context), len(ids)) - 1
        return await self._servers.ask_one(self._server, *self._dialect.cached_read(ids, start, self._reads.k))


def _same(a: TokenLogprobs, b: TokenLogprobs) -> bool:
    """Whether two reads of the same tokens differ by no more than rounding."""
    differences = torch.cat([_difference(a.own, b.own), _difference(a.top, b.top).flatten()])
    return bool(differences.mean() <= _MEAN and differences.max() <= _LARGEST)


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.clamp_min(LOWEST) - b.clamp_min(LOWEST)).abs()
