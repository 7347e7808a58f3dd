"""Head of a server's response that is passed on to a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Headers of the connection (RFC 9110, section 7.6.1), and those that the passing server writes itself.
_OWN = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer"),
    *(b"transfer-encoding", b"upgrade", b"date", b"server"),
}


@dataclass(frozen=True)
class ResponseHead:
    """Status, and the headers that concern the content."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def of(cls, status: int, headers: Sequence[tuple[bytes, bytes]]) -> ResponseHead:
        """Leave out the headers that concern one connection only."""
        lower = [(name.lower(), value) for name, value in headers]
        named = {
            token.strip().lower() for name, value in lower if name == b"connection" for token in value.split(b",")
        }
        left_out = _OWN | named
        if (b"content-type", b"text/event-stream") in [(name, value.lower()[:17]) for name, value in lower]:
            left_out.add(b"content-length")  # an error event may follow
        return cls(status, [(name, value) for name, value in lower if name not in left_out])

    @property
    def is_event_stream(self) -> bool:
        types = (value for name, value in self.headers if name == b"content-type")
        return any(value.lower().startswith(b"text/event-stream") for value in types)
