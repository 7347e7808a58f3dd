"""Concurrent completions from the replicas of one model.

Rollouts continue a partial answer. Only `/v1/completions` supports this: a chat completion begins a new turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from parse_infer.backends.pool.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.identity import Identity
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import Failing, Unavailable
from parse_infer.backends.servers.api_keys import DRAFT_VARIABLE, draft_key, find_key
from parse_infer.backends.servers.dialects.registry import DEFAULT
from parse_infer.errors import ParseError
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.settings.sampling import Sampling

if TYPE_CHECKING:
    from data_tools.labels.backends import Role
    from data_tools.labels.build_config import BuildConfig

_BACK_OFF_S = 0.5
_RESUME_HINT = "the same command continues where it stopped"
T = TypeVar("T")


@dataclass(frozen=True)
class ServedCompletion:
    """A completion: text, token ids if requested, and whether an end token ended the completion."""

    text: str
    ids: list[int] | None
    ended: bool


@dataclass(frozen=True)
class CompletionRequest:
    """Request of at most `max_tokens` tokens after `prompt`: token ids, or text for a server that takes no ids."""

    home: int
    """Index of the first server to try, modulo their number. Requests with a common prefix share the index."""
    prompt: list[int] | str
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: Collection[int] = ()

    def body(self) -> dict[str, Any]:
        """Return the JSON of the request, without the model. A text prompt uses only parameters of OpenAI's API."""
        sampling = self.sampling
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": sampling.temperature}
        body |= {"prompt": self.prompt, "top_p": sampling.top_p}
        if sampling.seed is not None and not sampling.greedy:
            body["seed"] = sampling.seed
        if isinstance(self.prompt, list):
            # Without these values, vLLM uses the model's generation config.
            body |= {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"stop_token_ids": sorted(self.end_ids), "return_token_ids": True}
        return body

    def read(self, response: Mapping[str, Any], url: str) -> ServedCompletion:
        """Return the answer in a response; raise TransientServerError if it is incomplete."""
        try:
            choice = response["choices"][0]
            text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
        except (LookupError, TypeError, AttributeError):
            raise TransientServerError(f"{url} sent no completion") from None
        if reason not in ("stop", "length") or not isinstance(text, str):  # vLLM reports "abort" at its shutdown
            raise TransientServerError(f"{url} ended an answer with finish_reason {reason!r}")
        if isinstance(self.prompt, str):
            return ServedCompletion(text, None, reason == "stop")
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise TransientServerError(f"{url} sent an answer without token_ids")
        if len(ids) > self.max_tokens or (reason == "length" and len(ids) < self.max_tokens):
            raise TransientServerError(f"{url} sent {len(ids)} tokens, but {self.max_tokens} were requested")
        return ServedCompletion(text, ids, reason == "stop")


@dataclass(frozen=True)
class ReadRequest:
    """Request of the log-probabilities of the prompt's last tokens, `draft`, with `k` first choices each."""

    prompt: list[int]
    draft: list[int]
    k: int
    home: int

    def body(self) -> dict[str, Any]:
        return DEFAULT.read(self.prompt, self.k).body

    def read(self, response: Mapping[str, Any], url: str) -> TokenLogprobs:
        """Return the log-probabilities in a response; raise ValueError if they are missing."""
        try:
            return DEFAULT.parse(response, self.draft, self.k)
        except ValueError as error:
            raise ParseError(f"the server {url} cannot supply log-probabilities: {error}") from error


class CompletionServers:
    """The replicas that `config` names for the role.

    The API key is the environment variable OPENAI_API_KEY; of draft servers at another address PARSE_DRAFT_API_KEY.

    `config.concurrency` bounds the requests in flight per replica; only these requests are in memory.

    Attributes:
        at_once: requests in flight, at most.
    """

    def __init__(self, config: BuildConfig, role: Role) -> None:
        self.urls = config.draft_url if role == "draft" and config.draft_url else config.target_url
        self._concurrency, self._max_outage = config.concurrency, config.max_outage
        self.at_once = self._concurrency * len(self.urls)
        self._slots = self._free_slots()
        variable = "OPENAI_API_KEY"
        key = find_key(variable, None, variable)
        if role == "draft" and config.draft_url:
            variable = DRAFT_VARIABLE
            key = draft_key(find_key(variable, None, variable), key, config.draft_url, config.target_url)
        self._client = Client(key, config.request_timeout, f"set the environment variable {variable}")
        model = getattr(config, f"served_{role}") or getattr(config, role)
        url_key = "draft_url" if role == "draft" else "target_url"
        self._pool = ReplicaPool(
            role,
            self.urls,
            self._client,
            patience_s=config.max_outage,
            identity=Identity(role, self._client, model, url_key, f"served_{role}"),
            attempts=config.retries + 1,
            back_off_s=_BACK_OFF_S,
        )

    def check(self, prompt: list[int] | str, read: ReadRequest | None = None) -> int:
        """Request the model list, one token after `prompt` and this read, if any, from every server that answers.

        Returns:
            The smallest context window of the servers; 0 if unknown.

        Raises:
            OSError: no server answers.
            ValueError: a server is unusable; the message is one sentence.
        """
        self._pool.examine = partial(self._examine, CompletionRequest(0, prompt, max_tokens=1), read)
        self._run(self._pool.handshake())
        return self._pool.identity.window

    def version(self) -> str | None:
        """Return the version that the first healthy vLLM server reports; None for other servers."""
        for server in self._pool.members:
            if server.healthy:
                try:
                    return str(self._run(self._client.get(f"{server.url}/version"))["version"])
                except (OSError, ValueError, LookupError, TypeError, TransientServerError):
                    continue
        return None

    def read(self, requests: Iterable[ReadRequest]) -> list[TokenLogprobs]:
        """Send the requests, and return the log-probabilities in the same order. Raises as `complete` does."""
        return self._run(self.complete(requests))

    async def complete(self, requests: Iterable[CompletionRequest | ReadRequest]) -> list[Any]:
        """Send the requests in order, and return what they read from the responses, in the same order.

        Raises:
            ConnectionError: the servers have been unavailable for more than `max_outage` seconds.
            ValueError: a server rejected a request, or a request failed too often.
        """
        try:
            return await self._send(requests)
        except Failing as error:
            way_out = "repair the server, or raise retries or request_timeout"
            raise ParseError(f"{error}: {way_out}; {_RESUME_HINT}") from None
        except Unavailable as error:
            raise ConnectionError(
                f"{error}; the build has waited max_outage, {self._max_outage:g} s: restart the server; {_RESUME_HINT}"
            ) from None
        except RequestRejected as error:
            raise ParseError(f"{error}; {_RESUME_HINT}") from None

    async def close(self) -> None:
        """Release what is bound to this event loop; the next call may run in another."""
        self._slots = self._free_slots()
        await self._pool.aclose()

    async def _send(self, requests: Iterable[CompletionRequest | ReadRequest]) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = enumerate(requests)

        async def work() -> None:
            for number, request in waiting:
                home = self._home(request)
                async with self._slots[home]:
                    with self._pool.acquire(home=home) as lease:
                        answers[number] = await self._pool.ask(request.body(), lease, read=request.read)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.at_once):
                    group.create_task(work())
        except ExceptionGroup as failures:  # the first failure cancelled the other tasks
            raise failures.exceptions[0] from None
        return [answers[number] for number in range(len(answers))]

    def _home(self, request: CompletionRequest | ReadRequest) -> int:
        """Return the index of the request's server, or of a healthy substitute."""
        members = self._pool.members
        healthy = [i for i, server in enumerate(members) if server.healthy] or range(len(members))
        own = request.home % len(members)
        return own if own in healthy else healthy[own % len(healthy)]

    def _free_slots(self) -> list[asyncio.Semaphore]:
        return [asyncio.Semaphore(self._concurrency) for _ in self.urls]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in an event loop of its own."""

        async def closing() -> T:
            try:
                return await work
            finally:
                await self.close()

        return asyncio.run(closing())

    async def _examine(self, request: CompletionRequest, read: ReadRequest | None, server: Replica) -> None:
        """Raise ValueError if the server does not continue the prompt of the request, or cannot answer the read."""
        text = "" if isinstance(request.prompt, str) else "; if the server does not take token ids, set wire to text"
        try:
            request.read(await self._pool.ask_one(server, request.body()), server.url)
        except TransientServerError as error:
            raise ParseError(f"the server at {server.url} does not continue a prompt: {error}{text}") from None
        except RequestRejected as error:
            if error.status in (404, 405):
                raise ParseError(
                    f"the server at {server.url} has no /v1/completions ({error.status} {error.sentence}), and chat "
                    "completions cannot continue a partial answer: use vLLM, SGLang or transformers serve"
                ) from None
            raise ParseError(f"the server at {server.url} refuses to continue a prompt: {error}{text}") from None
        if read is not None:
            try:
                read.read(await self._pool.ask_one(server, read.body()), server.url)
            except (TransientServerError, RequestRejected) as error:
                raise ParseError(
                    f"the server at {server.url} cannot read drafts: {error}; take a vLLM server, or set logprobs to 0"
                ) from None
