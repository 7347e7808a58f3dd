"""Backend for a served model, with the same tokens in and out as the local decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data_tools.labels.served.servers import CompletionRequest, CompletionServers, ReadRequest, ServedCompletion
from parse_infer.errors import ParseError
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.models.batch_decoder import BatchRow, Contexts
from parse_infer.models.fingerprint import describe_config, fingerprint_of
from parse_infer.models.loading import load_config, load_served_model
from parse_infer.text.detokenizer import encode_continuation
from parse_infer.text.prompts import prompt_text

if TYPE_CHECKING:
    from data_tools.labels.backends import Role
    from data_tools.labels.build_config import BuildConfig


class ServedWriter:
    """A model whose weights are on servers and whose tokenizer is in this process.

    `config.wire` "ids" sends and receives token ids. "text" is for servers without ids: the server tokenizes prompts,
    and this process tokenizes answers.

    Raises:
        ValueError, OSError: the tokenizer or a server is unusable; the message is one sentence.
    """

    def __init__(self, config: BuildConfig, role: Role) -> None:
        self.model = model = load_served_model(
            getattr(config, role),
            trust_remote_code=config.trust_remote_code,
            template_options=config.template_options,
        )
        self.config, self.servers = config, CompletionServers(config, role)
        # While some groups wait for their last rollouts, others fill the servers.
        self.groups_at_once = 2 + 2 * self.servers.at_once // config.problems_per_group
        self.drafts_at_once = 16 * self.servers.at_once
        ids = model.render("What is 3 + 4?")
        reads = ReadRequest(ids, ids[-2:], config.logprobs, 0) if config.logprobs and role == "target" else None
        window = self.servers.check(self.prompt(ids), reads)
        if 0 < window < model.window:
            # A rollout cut short by the window would decide nothing.
            needed = config.max_draft_tokens + (config.max_rollout_tokens if role == "target" else 0)
            if window <= needed:
                raise ParseError(
                    f"{', '.join(self.servers.urls)} has a window of {window} tokens, too few for a prompt and "
                    f"{needed} more: start the server with a longer window, or lower max_draft_tokens or "
                    "max_rollout_tokens"
                )
            model.window = window
        model.window -= 1  # a read writes a token, which the server counts

    def decoder(self, end_ids: Collection[int]) -> ServedDecoder:
        return ServedDecoder(self, end_ids)

    def describe(self) -> dict[str, Any]:
        config = load_config(self.model.name, trust_remote_code=self.config.trust_remote_code)
        config._name_or_path = self.model.name
        return describe_config(config, self.model.name) | {"fingerprint": fingerprint_of([None] * 3)}

    def read(self, drafts: Sequence[tuple[list[int], list[int]]], k: int) -> list[TokenLogprobs]:
        homes: dict[tuple[int, ...], int] = {}
        requests = [
            ReadRequest([*context, *draft], draft, k, homes.setdefault(tuple(context), len(homes)))
            for context, draft in drafts
        ]
        return self.servers.read(requests)

    def describe_reads(self) -> dict[str, Any]:
        return {"engine": "openai", "version": self.servers.version(), "dtype": None, "quantization": None}

    async def close(self) -> None:
        await self.servers.close()

    def prompt(self, ids: list[int]) -> list[int] | str:
        """Return the request's prompt for these tokens."""
        return ids if self.config.wire == "ids" else prompt_text(self.model.tokenizer, ids)


@dataclass(frozen=True)
class ServedContexts(Contexts):
    """Sequences that may be in the servers' prefix caches."""

    prompts: list[int] = field(default_factory=list)
    """For each sequence, the index of the prefilled sequence with which it begins."""


class ServedDecoder:
    """Decodes rows through requests to the servers.

    Rows that share a prefix are consecutive requests to the same server, the shorter prefix first, so that the
    server's prefix cache applies.

    Attributes:
        eos_ids: tokens that end a row; a row includes its end token.
    """

    def __init__(self, writer: ServedWriter, end_ids: Collection[int]) -> None:
        self.writer = writer
        self.eos_ids = frozenset(end_ids)

    def prefill(self, sequences: Sequence[Sequence[int]]) -> ServedContexts:
        """Return contexts without sending a request."""
        return ServedContexts([list(sequence) for sequence in sequences], None, list(range(len(sequences))))

    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> ServedContexts:
        """Return contexts without sending a request."""
        assert isinstance(contexts, ServedContexts)
        ids = [[*contexts.ids[parent], *suffix] for parent, suffix in zip(parents, suffixes, strict=True)]
        return ServedContexts(ids, None, [contexts.prompts[parent] for parent in parents])

    async def write(self, contexts: Contexts, rows: Sequence[BatchRow]) -> list[list[int]]:
        """Return the new tokens of every row, end token included. A row without end token has `max_new_tokens`.

        Raises:
            ValueError, OSError: a request got no answer (`CompletionServers.complete`).
        """
        assert isinstance(contexts, ServedContexts)
        order = [i for i in prefix_order(contexts, rows) if rows[i].max_new_tokens > 0]
        answers = await self.writer.servers.complete(self._requests(contexts, [rows[i] for i in order]))
        written: list[list[int]] = [[] for _ in rows]
        for i, answer in zip(order, answers, strict=True):
            written[i] = self._tokens(answer, rows[i].max_new_tokens)
        return written

    def _requests(self, contexts: ServedContexts, rows: Sequence[BatchRow]) -> Iterator[CompletionRequest]:
        for row in rows:
            prompt = self.writer.prompt(contexts.ids[row.context][: row.length])
            yield CompletionRequest(
                contexts.prompts[row.context], prompt, row.max_new_tokens, row.sampling, self.eos_ids
            )

    def _tokens(self, answer: ServedCompletion, max_tokens: int) -> list[int]:
        model = self.writer.model
        # The token limit may end inside a character.
        text = answer.text if answer.ended else answer.text.rstrip("\ufffd")
        ids = encode_continuation(model.tokenizer, "\n", text) if answer.ids is None else answer.ids
        ids = ids[:max_tokens]  # this tokenizer may split the text into more tokens than the server
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if end is not None:
            return ids[: end + 1]
        if answer.ended and model.end_token is not None and len(ids) < max_tokens:  # some servers omit the end token
            return [*ids, model.end_token]
        return ids


def prefix_order(contexts: ServedContexts, rows: Sequence[BatchRow]) -> list[int]:
    """Return the row indices in an order that makes rows with a common prefix adjacent."""

    def place(i: int) -> tuple[int, list[int], int]:
        context = rows[i].context
        return contexts.prompts[context], contexts.ids[context], rows[i].length

    return sorted(range(len(rows)), key=place)
