"""Hidden states captured for one reader of a decoder, such as an EAGLE head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class HiddenCapture:
    """Buffers the inputs of some layers for every token of the decoder's cache, until the reader takes them.

    Created by `Decoder.capture_hidden`, which holds only a weak reference.

    Attributes:
        layers: layer indices; the index after the last layer is the final-norm state.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._start = self._end = 0  # token range of the buffered rows; _end is the end of the cache
        self._rows: list[Tensor] = []

    def pop_hidden(self) -> tuple[int, Tensor | None]:
        """Return and clear the buffer: position of the first token, and [n, len(layers) * H] or None.

        The buffer holds no tokens that have left the context. If the first position is below the end of the last call,
        the context was cropped to this position in between.
        """
        start, rows = self._start, self._rows
        self._start, self._rows = self._end, []
        return start, torch.cat(rows) if rows else None

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Append the layers' inputs, [1, T, H] each, for the next T tokens."""
        rows = torch.cat([states[layer][0] for layer in self.layers], dim=-1)
        self._rows.append(rows)
        self._end += len(rows)

    def crop(self, length: int) -> None:
        """Drop all but the first `length` tokens of the cache."""
        while self._rows and self._end > length:
            last = self._rows.pop()
            self._end -= len(last)
            if self._end < length:
                self._rows.append(last[: length - self._end])
                self._end = length
        self._start, self._end = min(self._start, length), min(self._end, length)

    def move(self, start: int, path: Sequence[int]) -> None:
        """Move the rows of tokens `start + path[0]`, `start + path[1]`, … to `start`, `start + 1`, …"""
        if self._rows:
            rows, first = torch.cat(self._rows), start - self._start
            nodes = torch.tensor(path, device=rows.device)
            places = torch.arange(len(path), device=rows.device)
            self._rows = [rows.index_copy(0, first + places, rows[first + nodes])]
