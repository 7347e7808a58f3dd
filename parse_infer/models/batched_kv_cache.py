"""KV cache of a batch of rows, each at its own position.

Slot j of a row holds the key and value at position j of the row. A row may therefore start anywhere in a copied
context, rows of different lengths share a batch, and sliding windows are exact. The mask hides the stale slots after a
row's last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64  # slots added at a time; keeps the key length aligned for fused attention
_MORE_ROWS = 16  # spare rows added at a time: a copy of all keys for every new row would fragment gigabytes of memory


class BatchedKVCache(Cache):
    """One `KVLayer` for each layer of a model, all with the same rows and slots."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        super().__init__(layers=list(layers))
        self.kv = list(layers)

    @property
    def n_rows(self) -> int:
        return self.kv[0].keys.shape[0]

    @property
    def capacity(self) -> int:
        """Slots of each row."""
        return self.kv[0].keys.shape[2]

    def place(self, slots: Tensor, n_keys: int) -> None:
        """Let the next forward write to `slots` [B, n] and attend to the first `n_keys` slots of each row."""
        rows = torch.arange(self.n_rows, device=slots.device)[:, None]
        self.reserve(n_keys)
        for layer in self.kv:
            layer.rows, layer.slots, layer.n_keys = rows, slots, n_keys

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` slots."""
        missing = capacity - self.capacity
        if missing > 0:
            added = -(-missing // GROWTH) * GROWTH
            self._replace(lambda old: torch.cat([old, old.new_zeros(*old.shape[:2], added, old.shape[3])], dim=2))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = torch.tensor(rows, device=self.kv[0].keys.device, dtype=torch.long)
        self._replace(lambda old: old.index_select(0, index))

    def append(self, n: int) -> None:
        """Append `n` empty rows."""
        n_rows = self.n_rows + n
        for layer in self.kv:
            layer.extend(n_rows)

    def load(self, rows: Sequence[int], source: BatchedKVCache, source_rows: Sequence[int], n_slots: int) -> None:
        """Overwrite the first `n_slots` slots of `rows` with those of `source_rows` of `source`."""
        self.reserve(n_slots)
        device = self.kv[0].keys.device
        to, of = torch.tensor(rows, device=device), torch.tensor(source_rows, device=device)
        for mine, theirs in zip(self.kv, source.kv, strict=True):
            mine.keys[to, :, :n_slots] = theirs.keys[of, :, :n_slots]
            mine.values[to, :, :n_slots] = theirs.values[of, :, :n_slots]

    def select(self, rows: Sequence[int], capacity: int) -> BatchedKVCache:
        """Copy these rows (repetition allowed) to a cache of `capacity` slots."""
        copy = self.empty(len(rows), capacity)
        copy.load(range(len(rows)), self, rows, min(capacity, self.capacity))
        return copy

    def empty(self, n_rows: int, capacity: int) -> BatchedKVCache:
        """Create a cache of empty rows, filled with zeros, because a NaN would spread through the mask."""
        capacity = -(-capacity // GROWTH) * GROWTH

        def blank(old: Tensor) -> Tensor:
            return old.new_zeros(n_rows, old.shape[1], capacity, old.shape[3])

        return BatchedKVCache([KVLayer(blank(layer.keys), blank(layer.values)) for layer in self.kv])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.kv:
            layer.replace(change)


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, kv heads, slots, head size]."""

    is_sliding = False
    keys: Tensor  # type: ignore[assignment]  # never None here, unlike in the base class
    values: Tensor  # type: ignore[assignment]

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._buffers = [keys, values]  # the same with spare rows of zeros
        self.is_initialized = True
        self.rows, self.slots, self.n_keys = torch.empty(0, 1), torch.empty(0, 0), 0

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change keys and values. One at a time, so that at most one tensor exists twice."""
        self.keys = self._buffers[0] = change(self.keys)
        self.values = self._buffers[1] = change(self.values)

    def extend(self, n_rows: int) -> None:
        """Append rows of zeros, until there are `n_rows`."""
        for i, buffer in enumerate(self._buffers):
            if (missing := n_rows - buffer.shape[0]) > 0:
                self._buffers[i] = torch.cat([buffer, buffer.new_zeros(missing + _MORE_ROWS, *buffer.shape[1:])])
        self.keys, self.values = (buffer[:n_rows] for buffer in self._buffers)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the constructor receives the memory."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, heads, n, D] to the placed slots; return the first `n_keys` slots."""
        self.keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.n_keys], self.values[:, :, : self.n_keys]

    # transformers calls these for its own masks, which this cache never uses.
    def get_seq_length(self) -> int:
        return max(self.n_keys - 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_keys, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1
