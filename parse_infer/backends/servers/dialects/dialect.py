"""`Dialect`: the requests and responses in which the engines of servers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from parse_infer.backends.servers.dialects.prompt_logprobs import read_prompt_logprobs
from parse_infer.judge.token_logprobs import TokenLogprobs

COMPLETIONS = "/v1/completions"


class Call(NamedTuple):
    """A `POST`: its JSON body, and its path on the server."""

    body: dict[str, Any]
    path: str = COMPLETIONS


class Dialect:
    """The dialect of an engine with OpenAI's API that returns no log-probabilities of prompts.

    Such a server drafts, or answers requests that are passed through. An engine that returns them sets `reads_prompts`
    and overrides `read`, `cached_read`, `entries` and `cached_tokens`: then its server can be a target with a judge on
    log-probabilities.

    Attributes:
        name: name of the engine, for messages.
        owner: value of `owned_by` in the engine's model list.
        reads_prompts: the engine returns log-probabilities of prompts.
        load_metrics: names of the gauges that count its requests, running and waiting.
        reserved_tokens: tokens of the reported context window that neither prompt nor answer may use.
    """

    name: ClassVar[str]
    owner: ClassVar[str]
    reads_prompts: ClassVar[bool] = False
    load_metrics: ClassVar[tuple[str, ...]] = ()
    reserved_tokens: ClassVar[int] = 0

    def identifies(self, card: Mapping[str, Any]) -> bool:
        """Whether an entry of `/v1/models` comes from this engine."""
        return card.get("owned_by") == self.owner

    def read(self, ids: Sequence[int], k: int) -> Call:
        """The request for the log-probabilities of `ids` with k first choices each, which computes all of them."""
        raise NotImplementedError

    def cached_read(self, ids: Sequence[int], start: int, k: int) -> Call:
        """As `read`, but for the tokens after `ids[start]`, and computes only what the prefix cache lacks."""
        raise NotImplementedError

    def parse(self, response: object, ids: Sequence[int], k: int) -> TokenLogprobs:
        """Return the log-probabilities of the last tokens of a prompt, `ids`, from the response to a read.

        Raises ServerError for a response that `read_prompt_logprobs` refuses.
        """
        try:
            entries = self.entries(response, ids)
        except (KeyError, IndexError, TypeError, ValueError):
            entries = None
        return read_prompt_logprobs(entries, ids, k)

    def entries(self, response: object, ids: Sequence[int]) -> object:
        """The list that `read_prompt_logprobs` reads. May raise a LookupError, TypeError or ValueError."""
        raise NotImplementedError

    def cached_tokens(self, response: object) -> int | None:
        """Number of prompt tokens from the prefix cache, which have no entries; None: the response does not say."""
        raise NotImplementedError

    def stream(self, body: dict[str, Any], confidences: bool) -> dict[str, Any]:
        """Complete the body of a streamed completion in token ids.

        Args:
            confidences: request the log-probability of each token.
        """
        return body | {"logprobs": 0} if confidences else body  # 0: of the written token alone

    def abort(self, body: Mapping[str, Any]) -> Call | None:
        """The request that ends a stream; None: the engine stops when its connection is closed."""
        return None
