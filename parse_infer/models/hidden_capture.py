"""The hidden states that one reader of a decoder takes, such as a head that guesses tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class HiddenCapture:
    """What enters some layers for every token of the decoder's cache, until the reader takes it.

    Made by `Decoder.capture_hidden`, which forgets it as soon as the reader does.

    Attributes:
        layers: the number behind the last layer stands for the final-norm state.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._start = self._end = 0  # of the tokens whose rows are here; the cache ends at the end
        self._rows: list[Tensor] = []

    def pop_hidden(self) -> tuple[int, Tensor | None]:
        """What was captured since the last call: position of the first token, and [n, len(layers) * H] or None.

        Tokens that have left the context are not among them; a first position below the one that the last call ended
        at says that the context was cut back to there.
        """
        start, rows = self._start, self._rows
        self._start, self._rows = self._end, []
        return start, torch.cat(rows) if rows else None

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Take over what has entered each layer, [1, T, H], for the next T tokens."""
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
        """Let the tokens at `start + path[0]`, `start + path[1]`, … stand at `start`, `start + 1`, …"""
        if self._rows:
            rows, first = torch.cat(self._rows), start - self._start
            nodes = torch.tensor(path, device=rows.device)
            places = torch.arange(len(path), device=rows.device)
            self._rows = [rows.index_copy(0, first + places, rows[first + nodes])]
