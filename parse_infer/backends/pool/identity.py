"""Identity of servers: the same model and tokens, at the first connection and at every health check."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from parse_infer.backends.pool import health
from parse_infer.backends.pool.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.pool.health import Replica, examine_within_limit
from parse_infer.backends.pool.retries import Unavailable
from parse_infer.backends.servers.dialects.dialect import Dialect
from parse_infer.backends.servers.dialects.registry import DEFAULT, identify
from parse_infer.errors import ServerError

log = logging.getLogger("parse_infer.backends")

_SAMPLE = "Natalia sold 48/2 = 24 clips.\n\n  Überall, 数学: {x²} #### 1,072\t<b>"


@dataclass(frozen=True)
class Card:
    """A server's report of its model."""

    names: list[str]
    root: str | None
    window: int
    dialect: Dialect = DEFAULT


class Identity:
    """The model that all replicas must serve.

    Args:
        role: "target" or "draft", for messages.
        model: served model name, if the servers may list others before it.
        url_key, name_key: options for the addresses and for `model`, for messages.

    Attributes:
        model: served model name; set by `handshake` if not given.
        names: the models to choose from, if none was given; set by `handshake`.
        window: context window in tokens, or 0 if unknown; set by `handshake`.
    """

    def __init__(self, role: str, client: Client, model: str = "", url_key: str = "", name_key: str = "") -> None:
        self.role = role
        self.model = self._given = model
        self.names: list[str] = []
        self.window = 0
        self._client = client
        self._url_key, self._name_key = url_key or f"{role}_url", name_key

    async def handshake(self, members: Sequence[Replica], examine: Callable[[Replica], Awaitable[None]]) -> None:
        """Identify and examine each server; mark those that do not answer unhealthy.

        Raises:
            Unavailable: no server answers.
            ValueError: the servers serve different models, or a wrong model.
        """
        cards: dict[Replica, Card] = {}
        found = await asyncio.gather(*map(self._card_in_time, members), return_exceptions=True)
        for server, card in zip(members, found, strict=True):
            if isinstance(card, TransientServerError):
                self._away(server, card)
            elif isinstance(card, BaseException):
                raise card
            else:
                cards[server] = card
        names = sorted({card.names[0] for card in cards.values()})
        if len(names) > 1 and not self._given:
            raise ServerError(f"the {self.role} servers serve different models: {' and '.join(names)}")
        if cards:
            self.names = [] if self._given else next(iter(cards.values())).names
            self.model, self.window = self._given or names[0], min(card.window for card in cards.values())
        for server, card in cards.items():
            server.root = None
            try:
                self._compare(server, card)
                await examine_within_limit(server, examine)
                server.healthy = True
            except TransientServerError as error:
                self._away(server, error)
        if not any(server.healthy for server in members):
            raise Unavailable(self._hint(members[0]))
        for server in members:
            if not server.healthy:
                log.warning(self._hint(server))

    async def check(self, server: Replica) -> None:
        """Raise ValueError if a server serves a wrong model, TransientServerError if it does not answer."""
        self._compare(server, await self._card(server))

    async def check_tokens(self, name: str, tokenizer: PreTrainedTokenizerBase, server: Replica) -> None:
        """Raise ValueError if the server's `/tokenize` disagrees with the tokenizer of the model `name`."""
        body = {"model": self.model, "prompt": _SAMPLE, "add_special_tokens": False}
        try:
            ids = (await self._client.post(f"{server.url}/tokenize", body))["tokens"]
        except (TransientServerError, RequestRejected, KeyError, TypeError):  # only vLLM has this path
            return
        if ids != tokenizer.encode(_SAMPLE, add_special_tokens=False):
            raise ServerError(
                f"the {self.role} server {server.url} has other tokens than {name!r}: give the address of a "
                "server with that model"
            )

    async def _card_in_time(self, server: Replica) -> Card:
        try:
            async with asyncio.timeout(health.CHECK_LIMIT_S):
                return await self._card(server)
        except TimeoutError as error:
            raise TransientServerError(f"{server.url} does not answer within {health.CHECK_LIMIT_S:g} s") from error

    async def _card(self, server: Replica) -> Card:
        try:
            listed = (await self._client.get(f"{server.url}/v1/models"))["data"]
            if self._given:  # first
                listed = sorted(listed, key=lambda one: one["id"] != self._given) or [{"id": self._given}]
            names = [str(one["id"]) for one in listed]
            dialect, window = identify(listed[0]), int(listed[0].get("max_model_len") or 0)
            return Card(names, listed[0].get("root"), max(0, window - dialect.reserved_tokens), dialect)
        except TransientServerError as error:
            if self._given and error.status == 500:  # `transformers serve` without a hub cache
                return Card([self._given], None, 0)
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, RequestRejected) and error.status in (401, 403):
                raise
            reason = f" ({error})" if isinstance(error, RequestRejected) else ""
            raise ServerError(
                f"the {self.role} server {server.url} is not OpenAI-compatible{reason}: correct {self._url_key}"
            ) from error

    def _compare(self, server: Replica, card: Card) -> None:
        """Raise ValueError unless the server serves the right model."""
        if card.names[0] != self.model:
            message = f"the {self.role} server {server.url} serves {card.names[0]!r} and not {self.model!r}"
            if self._name_key:
                names = ", ".join(card.names[:12])
                message += f": set {self._name_key} to one of {names}, or {self._url_key} to another server"
            raise ServerError(message)
        if server.root is not None and card.root != server.root:
            raise ServerError(
                f"the {self.role} server {server.url} now serves {card.root!r}, before {server.root!r}: "
                "restart PARSE if this is intended"
            )
        if card.window < self.window:
            raise ServerError(
                f"the {self.role} server {server.url} now has a window of {card.window} tokens, before {self.window}: "
                "restart PARSE if this is intended"
            )
        server.root, server.dialect = card.root, card.dialect

    def _away(self, server: Replica, error: TransientServerError) -> None:
        server.healthy, server.examined, server.last_error = False, False, str(error)

    def _hint(self, server: Replica) -> str:
        return f"the {self.role} server {server.last_error}: start it, or correct {self._url_key}"
