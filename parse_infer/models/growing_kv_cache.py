"""KV cache of one context, preallocated so that a new token copies no earlier keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST = 256  # initial capacity in tokens without a reservation


def new_cache(reserved: Callable[[], int] = lambda: 0) -> Cache:
    """Create an empty cache for one sequence.

    Args:
        reserved: returns the expected number of tokens; called whenever a layer needs more memory.
    """
    return Cache(layer_class_to_replicate=partial(GrowingKVCache, reserved=reserved))  # type: ignore[arg-type]


class GrowingKVCache(CacheLayerMixin):
    """Keys and values of one layer: the first `length` tokens of a larger buffer, [1, kv heads, length, head size].

    The cache keeps every token, also in sliding-window layers, where the mask applies the window. The buffer grows to
    the reserved size, and doubles beyond it.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, reserved: Callable[[], int], **_: Any) -> None:
        super().__init__()
        self._reserved = reserved
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (s.new_empty(*s.shape[:2], 0, s.shape[3]) for s in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [1, kv heads, n, head size]; return all of them, as views of the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self._keys.shape[2]:
            self._grow(start)
        self._keys[:, :, start : self.length] = key_states
        self._values[:, :, start : self.length] = value_states
        self._view()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def crop(self, max_length: int) -> None:
        """Remove -max_length tokens from the end (transformers' convention: the number is negative)."""
        self.length += max_length
        self._view()

    def _view(self) -> None:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def _grow(self, used: int) -> None:
        capacity = self._reserved()
        if capacity < self.length:
            capacity = max(_FIRST, 2 * self._keys.shape[2], self.length)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)

    # transformers calls these.
    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1
