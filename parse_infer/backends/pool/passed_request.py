"""A client's request that goes to a server as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
