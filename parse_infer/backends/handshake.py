"""What servers serve: the same model, with the adapter that drafts are judged with, when they are met and later."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from parse_infer.backends.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.health import Server
from parse_infer.backends.retries import Unavailable

log = logging.getLogger("parse_infer.backends")

_SAMPLE = "Natalia sold 48/2 = 24 clips.\n\n  Überall, 数学: {x²} #### 1,072\t<b>"


@dataclass(frozen=True)
class Card:
    """What a server says about its model."""

    names: list[str]
    root: str | None
    window: int


class Identity:
    """
    Args:
        role: for messages: "target" or "draft".
        judge: the name under which a server with the right adapter serves too; None: drafts are judged without one.

    Attributes:
        model: the name under which the servers serve their model; known after `meet`.
        window: tokens that prompt and answer may have together there; known after `meet`.
    """

    def __init__(self, role: str, client: Client, judge: str | None) -> None:
        self.role, self.judge = role, judge
        self.model = ""
        self.window = 0
        self._client = client

    async def handshake(self, members: Sequence[Server], examine: Callable[[Server], Awaitable[None]]) -> None:
        """Learn what the servers serve, and examine each; those that do not answer are not well.

        Raises:
            Unavailable: none answers.
            ValueError: they serve different models, or not what they should.
        """
        cards: dict[Server, Card] = {}
        for server in members:
            try:
                cards[server] = await self._card(server)
            except TransientServerError as error:
                self._away(server, error)
        names = sorted({card.names[0] for card in cards.values()})
        if len(names) > 1:
            raise ValueError(f"the {self.role} servers serve different models: {' and '.join(names)}")
        if cards:
            self.model, self.window = names[0], min(card.window for card in cards.values())
        judged = self.judge is None or any(self.judge in card.names for card in cards.values())
        for server, card in cards.items():
            server.root, server.judges = None, judged
            try:
                self._compare(server, card)
                await examine(server)
                server.examined = server.healthy = True
            except TransientServerError as error:
                self._away(server, error)
        if not any(server.healthy for server in members):
            raise Unavailable(self._hint(members[0]))
        if not judged:
            raise ValueError(
                f"the {self.role} server {next(iter(cards)).url} does not serve the adapter {self.judge}: start it "
                "with the command that python -m parse_infer.vllm_plugin.options prints for this adapter"
            )
        for server in members:
            if not server.healthy:
                log.warning(self._hint(server))

    async def check(self, server: Server) -> None:
        """ValueError unless a server serves what it should. Raises Lost where it does not answer."""
        self._compare(server, await self._card(server))

    async def check_tokens(self, name: str, tokenizer: PreTrainedTokenizerBase, server: Server) -> None:
        """ValueError where the server tells that it cuts text into other tokens than the model `name`."""
        body = {"model": self.model, "prompt": _SAMPLE, "add_special_tokens": False}
        try:
            found = (await self._client.post(f"{server.url}/tokenize", body))["tokens"]
        except (TransientServerError, RequestRejected, KeyError, TypeError):  # only vLLM has this path
            return
        if found != tokenizer.encode(_SAMPLE, add_special_tokens=False):
            raise ValueError(
                f"the {self.role} server {server.url} has other tokens than {name!r}: give the address of a "
                "server with that model"
            )

    async def _card(self, server: Server) -> Card:
        try:
            listed = (await self._client.get(f"{server.url}/v1/models"))["data"]
            first = listed[0]
            names = [str(one["id"]) for one in listed]
            return Card(names, first.get("root"), int(first.get("max_model_len") or 0))
        except RequestRejected:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the {self.role} server {server.url} is no OpenAI-compatible server") from error

    def _compare(self, server: Server, card: Card) -> None:
        """ValueError unless a server serves the model that it should; notes which adapter it has."""
        judges = self.judge is None or self.judge in card.names
        if card.names[0] != self.model:
            raise ValueError(f"the {self.role} server {server.url} serves {card.names[0]!r} and not {self.model!r}")
        moved = server.root is not None and card.root != server.root
        if moved and not (judges and self.judge):  # the adapter's name stands for the target's weights too
            raise ValueError(
                f"the {self.role} server {server.url} has loaded {card.root!r} and not {server.root!r} as before: "
                "restart the coordinator if that is meant"
            )
        if card.window < self.window:
            raise ValueError(
                f"the {self.role} server {server.url} takes {card.window} tokens and not {self.window} as before: "
                "restart the coordinator if that is meant"
            )
        server.root = card.root
        if judges == server.judges:
            return
        server.judges, server.examined = judges, False
        if judges:
            log.warning("the %s server %s runs the adapter %s again", self.role, server.url, self.judge)
        else:
            log.warning(
                "the %s server %s runs another adapter than %s (it serves %s): it judges no drafts, and where no "
                "other server does, no promise (risk) is kept and the target answers alone",
                self.role, server.url, self.judge, ", ".join(card.names),
            )  # fmt: skip

    def _away(self, server: Server, error: TransientServerError) -> None:
        server.healthy, server.examined, server.last_error = False, False, str(error)

    def _hint(self, server: Server) -> str:
        return f"the {self.role} server {server.last_error}: start it, or correct {self.role}_url"
