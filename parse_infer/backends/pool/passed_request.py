"""A client's request that goes to a server as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_IDEMPOTENT = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")
_STATELESS = re.compile(
    r"(/v\d)?/(chat/completions|completions|messages(/count_tokens)?|responses|embeddings|embed|rerank|score|pooling"
    r"|classify|tokenize|detokenize|audio/(transcriptions|translations))"
)
"""Routes that change nothing on a server but its caches. A stored response that nobody has the id of is no harm."""


@dataclass(frozen=True)
class PassedRequest:
    """
    Attributes:
        path: below the server's address, with the query.
        headers: those that concern the content, in lower case; without `content-type` the body is JSON.
        fields: the JSON object in `body`; None: it has another content, which is passed on as it is.
    """

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    fields: Mapping[str, Any] | None

    @property
    def streams(self) -> bool:
        return (self.fields or {}).get("stream") is True

    @property
    def answers(self) -> int:
        """The number of answers to its prompts."""
        fields: Mapping[str, Any] = self.fields or {}
        n, prompt = fields.get("n"), fields.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * (n if isinstance(n, int) and n > 0 else 1)

    @property
    def repeatable(self) -> bool:
        """Whether servers may carry the request out twice (RFC 9110, 9.2.2), unlike an upload or background work."""
        stateless = _STATELESS.fullmatch(self.path.partition("?")[0]) is not None
        return self.method in _IDEMPOTENT or (stateless and (self.fields or {}).get("background") is not True)
