"""Server-sent events: the lines of a stream (WHATWG HTML, section 9.2) to the data of its events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventDecoder:
    """Decodes a stream that arrives in pieces of any size, even within a character or a line end."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # of the unfinished line
        self._data: list[bytes] = []  # of the unfinished event
        self._after_cr = False
        self._first_line = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that end in `piece`."""
        if not piece:
            return []
        after_cr, self._after_cr = self._after_cr, piece.endswith(b"\r")
        if after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a line end
        *ended, rest = _LINE_END.split(piece)
        data: list[bytes] = []
        for end in ended:
            data += self._end_line(b"".join([*self._line, end]))
            self._line.clear()
        self._line.append(rest)
        return data

    def end(self) -> list[bytes]:
        """Return the data of an event whose blank line is missing: some servers end their streams without it."""
        data = self._end_line(b"".join(self._line)) + self._end_line(b"")
        self._line.clear()
        return data

    def _end_line(self, line: bytes) -> list[bytes]:
        if self._first_line:
            line, self._first_line = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            data, self._data = b"\n".join(self._data).strip(), []
            return [data] if data else []
        name, _, value = line.partition(b":")
        if name == b"data":  # other fields, and comments (with an empty name), hold nothing of an answer
            self._data.append(value)
        return []


async def event_data(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event of a stream."""
    decoder = EventDecoder()
    async for piece in pieces:
        for data in decoder.feed(piece):
            yield data
    for data in decoder.end():
        yield data
